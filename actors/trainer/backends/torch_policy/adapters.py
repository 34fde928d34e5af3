"""LoRA adapters over a frozen base (Hu et al., arXiv 2106.09685), made by peft.

    base ── rows shared by all policies, references and critics of a process that have the same section ``model``
      │
      └── a tree of modules for each of them: the base's own rows, and adapters ``B A`` in the target layers

A layer with the weight ``W`` computes ``W x + alpha / rank * B A x``. ``B`` begins as zeros, so that a new adapter
changes nothing.
"""

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ....errors import CheckpointMismatch
from ....json_files import read_json
from ....messages import LoraConfig, ModelConfig
from ....pretrained import outline_of, random_stream, without_parameters
from ...policy_files import check_tensors
from ...saved_policy import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from ...shards import Shard
from .completion_model import named_weights
from .gang_rank import GangRank, divided_like, gather, local
from .lora_targets import target_names
from .own_weights import ADAPTER_NAME, base_name, file_name, is_adapter, own_weights, saved_weights


def with_adapter(
    base: nn.Module,
    lora: LoraConfig,
    seed: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    path: str | None = None,
) -> tuple[Any, dict[str, Tensor]]:
    """New modules like ``base`` with an adapter, all of whose parameters are on ``meta``; and the values in ``dtype``
    that ``seed`` gives the adapter, on the CPU by the names of its parameters; None for ``seed``: none.

    ``path``: of the base, for the adapter's file. Raises ``ValueError`` for a target that ``base`` does not have.
    """
    targets = target_names(base, lora)
    model: Any = copy.deepcopy(base)
    config = PeftConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in base.modules()),
    )
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(random_stream(seed or 0))
        with _stand_ins(model, dtype):
            inject_adapter_in_model(config, model, ADAPTER_NAME)
    values = {name: parameter.detach() for name, parameter in model.named_parameters() if is_adapter(name)}
    return without_parameters(model), {} if seed is None else values


@contextmanager
def _stand_ins(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within it each parameter of ``model`` is on the CPU in ``dtype``, its numbers all the same one in memory: peft
    moves an adapter to the device and the type of the layer's weight, and on ``meta`` its values would be lost."""
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    for module, name, parameter in places:
        number = torch.zeros((), dtype=dtype).expand(parameter.shape)
        setattr(module, name, nn.Parameter(number, requires_grad=False))
    try:
        yield
    finally:
        for module, name, parameter in places:
            setattr(module, name, parameter)


def merged_weights(
    model: nn.Module, gang: GangRank, read: Callable[[str], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The whole model by the names of its base: in a layer with an adapter ``W + alpha / rank * B A``, in the adapter's
    type, so that it is rounded once. In a gang all ranks call this.

    Those that an adapter changes are copies, each made when it is taken; the others are the live ones. ``read``: gives
    a weight by its name in the base, if those of ``model`` are on ``meta``; called when the weight is taken.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    for name, tensor in named_weights(model).items():
        if is_adapter(name):
            continue
        if read is not None and tensor.is_meta:
            tensor = read(base_name(name))
        owner, _, leaf = name.rpartition(".base_layer.")
        if not owner:
            yield name, tensor
        elif leaf == "weight":
            part = gang.part(tensor)
            yield f"{owner}.{leaf}", divided_like(tensor, local(tensor) + _change(layers[owner], part))
        else:
            yield f"{owner}.{leaf}", tensor


@torch.no_grad()
def _change(layer: Any, part: Shard) -> Tensor:
    """The rows ``part`` of ``alpha / rank * B A`` of a layer, as its weight lies."""
    a, b = (gather(matrix[ADAPTER_NAME].weight) for matrix in (layer.lora_A, layer.lora_B))
    rows = slice(part.start, part.stop)
    scale: float = layer.scaling[ADAPTER_NAME]
    product: Tensor = (b @ a).T[rows] if layer.fan_in_fan_out else b[rows] @ a
    return product * scale


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The adapter alone by the names in its file: ``A``, and ``alpha / rank * B``, a copy."""
    layers: dict[str, Any] = dict(model.named_modules())
    for name, tensor in own_weights(model).items():
        owner, _, matrix = name.partition(".lora_")
        scale = layers[owner].scaling[ADAPTER_NAME] if matrix.startswith("B.") else 1.0
        yield file_name(name), tensor if scale == 1.0 else tensor * scale


def write_adapter_config(model: Any, folder: Path) -> None:
    """Writes ``adapter_config.json``, as peft reads it."""
    config = copy.copy(model.peft_config[ADAPTER_NAME])
    config.inference_mode = True
    config.save_pretrained(folder)


def check_adapter_config(folder: Path, lora: LoraConfig) -> None:
    """Compares all of the adapter's settings that its tensors don't show. Raises CheckpointIncomplete, and
    CheckpointMismatch which names the first that differs."""
    path = folder / ADAPTER_CONFIG_FILE
    config = read_json(path)
    accepted: dict[str, Collection[object]] = {
        "peft_type": ("LORA",),
        "r": (lora.rank,),
        "lora_alpha": (lora.alpha,),
        "use_rslora": _UNSET,
        "use_dora": _UNSET,
        "rank_pattern": _UNSET,
        "alpha_pattern": _UNSET,
    }
    for key, values in accepted.items():
        if not any(config.get(key) == value for value in values):
            raise CheckpointMismatch(path, key, str(next(iter(values))), str(config.get(key)))


def check_adapter(folder: Path, model: ModelConfig, lora: LoraConfig) -> None:
    """Compares the files of an adapter with a policy's config. Raises as ``check_adapter_config`` and
    ``check_tensors``, ``ValueError`` for an unknown target, OSError if ``model`` can't be loaded."""
    check_adapter_config(folder, lora)
    outline, _ = with_adapter(outline_of(model, torch.float32), lora)
    check_tensors(folder / ADAPTER_FILE, saved_weights(outline))


_UNSET: Final[tuple[object, ...]] = (None, False, {})
