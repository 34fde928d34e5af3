"""LoRA adapters for vLLM, which has loaded their base: a version is some hundred kilobytes, installed in milliseconds.

    transport ──copy, digest──> tensors ──a folder in peft's format, removed at once──> vLLM's workers

Several adapters compute in one batch. Every version of each has a name of its own, which vLLM makes a part of the keys
of its prefix cache: keys and values of former versions, and of other adapters, are never reused for it. A request keeps
its version to its end.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from ....transport.handle import StateHandle
from ...json_files import write_json
from ...messages import ModelConfig
from ...pretrained import seeded_model
from ..inference_config import VLLM_RANKS
from ..instance_setup import ServedBase

_A: Final = ".lora_A.weight"


class AdapterVersions:
    """The newest version of each adapter over the model of ``llm``. ``model_version``: vLLM's name of the model's
    weights, which stay."""

    model_version: Final = "default"

    def __init__(self, llm: LLMEngine) -> None:
        self._llm = llm
        self._newest: dict[str, LoRARequest] = {}
        self.tensors: dict[str, Any] = {}
        self.reads_in_place = False

    def room_for(self, handle: StateHandle) -> dict[str, Any]:
        """See ``StepEngine``: adapters of different policies have different ranks and layers."""
        self.tensors = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in handle.tensors
        }
        return self.tensors

    def lora_of(self, adapter: str) -> LoRARequest | None:
        """The newest version of the adapter; None before its first version."""
        return self._newest.get(adapter)

    def install(self, tensors: Mapping[str, Any], number: int, adapter: str) -> None:
        """Takes over the weights ``tensors`` of an adapter. The former version of it leaves first, so that no other
        adapter has to make room."""
        if (former := self._newest.pop(adapter, None)) is not None:
            self._llm.remove_lora(former.lora_int_id)
        with tempfile.TemporaryDirectory(prefix="flexmarl-adapter-") as folder:
            _write(Path(folder), tensors)
            lora = LoRARequest(f"version {number}", number, folder)
            if not self._llm.add_lora(lora):
                raise RuntimeError("vLLM did not take the adapter")
        self._newest[adapter] = lora

    def close(self) -> None:
        """Frees the memory that weights are copied into; the adapters end with ``llm``."""
        self.tensors = {}


def _write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """An adapter in peft's format, whose ``B`` has the factor ``alpha / rank`` in it: here ``alpha`` is the rank."""
    layers = [name.removesuffix(_A) for name in tensors if name.endswith(_A)]
    rank = max(tensors[layer + _A].shape[0] for layer in layers)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "bias": "none",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
    }
    write_json(folder / "adapter_config.json", config)
    save_file(dict(tensors), folder / "adapter_model.safetensors")


def base_source(model: ModelConfig, base: ServedBase, folder: str) -> str:
    """The folder, or the hub's name, that vLLM loads the base from. A random base is written to ``folder`` by its
    seed."""
    if model.path is not None:
        return model.path
    base_model = seeded_model(model, base.seed, torch.float32)
    base_model.config.architectures = [type(base_model).__name__]
    base_model.to(getattr(torch, model.dtype)).save_pretrained(folder)
    return folder


def lora_arguments(base: ServedBase) -> dict[str, Any]:
    """vLLM's arguments for adapters that compute in one batch."""
    reserved = next(rank for rank in VLLM_RANKS if rank >= base.most_rank)
    most = base.adapters
    return {"enable_lora": True, "max_loras": most, "max_cpu_loras": most, "max_lora_rank": reserved}
