"""New weights for vLLM: the memory that they are in, and the weight transfer engine that its workers read them with.

    one worker, in this process      the trainer's memory of a device or of the host <──in place── WeightReader
    processes (tensor parallelism)   transport ──copy──> StagedWeights (one memfd) <──mapped── WeightReader in each

vLLM replaces weights in three calls: ``start_weight_update``, ``update_weights`` and ``finish_weight_update``. Names,
shapes and the digest were checked before the first of them: until then a failure leaves vLLM's weights as they are.
After an error within the three, parts of the model have no memory, and the engine is lost.

No tensor is sent to a worker that is another process, only the memfd's path: its weights go through the host.
"""

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.engine.llm_engine import LLMEngine

from ....transport.handle import ALIGNMENT, StateHandle
from .tensor_digest import digests_of

BACKEND: Final = "flexmarl"
"""The name of ``WeightReader`` in vLLM's config."""


class StagedWeights:
    """Memory for one version of a policy's weights, which other processes of this user can map.

    ``tensors``: by their names in Hugging Face's state dict, to be overwritten in place.
    """

    def __init__(self, outline: Mapping[str, Tensor]) -> None:
        """``outline``: names, shapes and dtypes, on any device. Raises OSError if there is too little memory."""
        self._layout: list[tuple[str, list[int], str, int]] = []
        end = 0
        for name, tensor in outline.items():
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._layout.append((name, list(tensor.shape), dtype, begin))
            end = begin + tensor.numel() * tensor.element_size()
        self._file = os.fdopen(os.memfd_create("flexmarl-staged-weights"), "r+b", buffering=0)
        os.posix_fallocate(self._file.fileno(), 0, end)  # else a full memory would kill this process later
        self.tensors = _map_tensors(self._file.fileno(), self._layout)

    def location(self) -> dict[str, Any]:
        """The keyword arguments of ``StagedLocation``. Valid until ``close``."""
        return {"path": f"/proc/{os.getpid()}/fd/{self._file.fileno()}", "layout": self._layout}

    def close(self) -> None:
        """The memory is freed with the last tensor, here and in the workers."""
        self._file.close()


def _map_tensors(descriptor: int, layout: list[tuple[str, list[int], str, int]]) -> dict[str, Tensor]:
    flat = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
    tensors = {}
    for name, shape, dtype_name, begin in layout:
        dtype: torch.dtype = getattr(torch, dtype_name)
        size = dtype.itemsize
        for length in shape:
            size *= length
        tensors[name] = flat[begin : begin + size].view(dtype).view(shape)
    return tensors


class WholeVersions:
    """Replaces all weights of ``llm``. ``model_version``: vLLM's name of the last ones."""

    model_version = "default"

    def __init__(self, llm: LLMEngine, outline: Mapping[str, Tensor], *, in_place: bool) -> None:
        """``in_place``: the worker is in this process and reads weights where they lie; others need memory that they
        can map."""
        self._llm = llm
        self._outline = outline
        self._staged = None if in_place else StagedWeights(outline)
        if self._staged is not None:
            llm.collective_rpc("init_weight_transfer_engine", args=(self._staged.location(),))

    @property
    def reads_in_place(self) -> bool:
        """True if the worker copies new weights out of the memory that they lie in; False if they are staged for it."""
        return self._staged is None

    @property
    def tensors(self) -> dict[str, Any]:
        """The tensors by their names in Hugging Face's state dict: staged memory, to be overwritten in place; the
        outline if the worker reads weights where they lie."""
        return dict(self._outline) if self._staged is None else self._staged.tensors

    def room_for(self, handle: StateHandle) -> dict[str, Any]:
        """See ``StepEngine``."""
        return self.tensors

    def lora_of(self, adapter: str) -> None:
        """Requests have no adapter."""

    def install(self, tensors: Mapping[str, Any], number: int, adapter: str) -> None:
        """Takes over ``tensors``. After an error vLLM may hold a part of them."""
        self._llm.collective_rpc("start_weight_update")
        update = {"tensors": tensors} if self.reads_in_place else {}
        self._llm.collective_rpc("update_weights", args=(update,))
        self._llm.collective_rpc("finish_weight_update")
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("keys and values of the former weights are still in use")
        self.model_version = str(number)
        self._llm.set_weight_version(self.model_version)

    def digests(self) -> dict[str, int]:
        """See ``StepEngine``: of all workers."""
        workers: list[dict[str, int]] = self._llm.collective_rpc("parameter_digests")
        # By other names than those published: a tensor of the same name may be packed, padded, or a part.
        return {
            f"vLLM's {name}" if len(workers) == 1 else f"vLLM's {name} in worker {rank}": digest
            for rank, digests in enumerate(workers)
            for name, digest in digests.items()
        }

    def close(self) -> None:
        """Gives the staged memory back (see ``StagedWeights.close``). The last call."""
        if self._staged is not None:
            self._staged.close()


@dataclass
class StagedLocation(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not checked
    """``path``: of the staged memory's file. ``layout``: name, shape, dtype and first byte of each tensor in it."""

    path: str
    layout: list[tuple[str, list[int], str, int]]


@dataclass
class WholeVersion(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is not checked
    """``tensors``: the weights; None: those that are staged."""

    tensors: Mapping[str, Tensor] | None = None


class WeightReader(WeightTransferEngine[StagedLocation, WholeVersion]):  # type: ignore[misc]  # vLLM is not checked
    """Copies weights out of the memory that they are in, into the model of one of vLLM's workers, layer by layer."""

    init_info_cls = StagedLocation
    update_info_cls = WholeVersion

    _staged: dict[str, Tensor]

    def init_transfer_engine(self, init_info: StagedLocation) -> None:
        """Maps the staged memory into this worker; vLLM calls it once, before the first update. Raises OSError if the
        process that has staged it is gone."""
        with Path(init_info.path).open("r+b") as file:
            self._staged = _map_tensors(file.fileno(), init_info.layout)

    def start_weight_update(self) -> None:
        """Begins an update: from now on the model's layers take weights in the form of a checkpoint."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: WholeVersion) -> None:
        """Has the model load all weights: those of ``update_info``, or the staged ones. Their memory stays as it is
        until ``finish_weight_update`` returns."""
        weights = self._staged if update_info.tensors is None else update_info.tensors
        loaded: set[str] = self.model.load_weights(iter(weights.items()))
        self._loaded = loaded

    def finish_weight_update(self) -> None:
        """Completes the layers, and waits until the device has read all weights. Raises ValueError, with the names, if
        a parameter of the model has got no new value."""
        finalize_layerwise_reload(self.model, self.model_config)
        _process_tied(self.model)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the memory that was read may be written again
        # Only now: until here tied parameters are two. vLLM itself keeps the old values of such a name.
        if missing := {name for name, _ in self.model.named_parameters()} - self._loaded:
            raise ValueError(f"no weight of the policy is for vLLM's {', '.join(sorted(missing))}")

    def shutdown(self) -> None:
        """Drops the mapped memory; vLLM calls it at the worker's end."""
        self._staged = {}


def _process_tied(model: nn.Module) -> None:
    """Computes again what later modules of a tied parameter made of its values. vLLM's reload does it for the first
    module alone, and its CPU engine generates with a packed copy."""
    processed: set[int] = set()
    for module in model.modules():
        parameters = {id(parameter) for parameter in module.parameters(recurse=False)}
        if parameters & processed:
            method = getattr(module, "quant_method", None)
            if isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(module)
        processed |= parameters


class WorkerExtension:
    """Named in vLLM's config: its methods are added to every worker. So each imports this module, which registers the
    transfer engine."""

    model_runner: Any

    def parameter_digests(self) -> dict[str, int]:
        """A digest of each parameter of this worker's part of the model."""
        return digests_of(dict(self.model_runner.model.named_parameters()))

    def clean_keys_and_values(self) -> None:
        """Puts zeros in place of keys and values that are not finite.

        Attention multiplies the unused part of a block by zero, and zero times NaN is NaN: the blocks of a broken
        request would break the requests that get them next.
        """
        for cache in self.model_runner.kv_caches:
            torch.nan_to_num_(cache, nan=0.0, posinf=0.0, neginf=0.0)


WeightTransferEngineFactory.register_engine(BACKEND, WeightReader)
