"""Rows of the weights in a folder of Hugging Face's, or of its hub, read from safetensors without the rest."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, hub

from ...shards import Shard, whole
from .stored_tensors import Files, StoredTensor, stored_tensors

_HUB: Any = hub  # without types in part
_COMPARED_BYTES: Final = 64 << 20


def saved_rows(
    model: PreTrainedModel, path: str, rows_of: Callable[[Sequence[int]], Shard]
) -> dict[str, Callable[[], Tensor]] | None:
    """Functions that read the rows ``rows_of(shape)`` of each parameter of ``model`` from ``path``, by its name, in the
    dtype of the file. Buffers of the files and settings of its generation go into ``model``, whose parameters are on
    ``meta``.

    None if that is left to transformers: if it would convert tensors otherwise than by merging experts, or names or
    shapes are not those of ``model``.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        return None
    stored = stored_tensors(model, _open_files(path))
    if stored is None:
        return None
    reads: dict[str, Callable[[], Tensor]] = {}
    for names, tensor in _tied_names(model):
        present = [stored[name] for name in names if name in stored]
        if not present or any(source.shape != tuple(tensor.shape) for source in present):
            return None
        if not all(_are_equal(present[0], other) for other in present[1:]):
            return None
        if tensor.is_meta:
            reads[names[0]] = partial(present[0].read, rows_of(tensor.shape))
        else:
            tensor.copy_(present[0].read(whole(tensor.shape)))
    _take_generation_config(model, path)
    return reads


def _tied_names(model: PreTrainedModel) -> list[tuple[list[str], Tensor]]:
    """All names of each tensor of the state, the first one first."""
    names: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), ([], tensor.detach()))[0].append(name)
    return list(names.values())


def _open_files(path: str) -> Files:
    paths: Sequence[str]
    try:
        paths = [str(_HUB.cached_file(path, SAFE_WEIGHTS_NAME))]
    except OSError:
        try:
            paths, _ = _HUB.get_checkpoint_shard_files(path, _HUB.cached_file(path, SAFE_WEIGHTS_INDEX_NAME))
        except OSError:
            return {}
    files: dict[str, Any] = {}
    for file_path in paths:
        file: Any = safe_open(file_path, framework="pt", device="cpu")
        files |= dict.fromkeys(file.keys(), file)
    return files


def _are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Compares two stored tensors that are tied in the model: transformers does not tie them if they differ."""
    shape = first.shape
    row_bytes = max(1, torch.Size(shape[1:]).numel() * 8)
    rows = max(1, _COMPARED_BYTES // row_bytes)
    length = shape[0] if shape else 1
    ranges = [Shard(shape, start, min(start + rows, length)) for start in range(0, length, rows)]
    return all(torch.equal(first.read(part), second.read(part)) for part in ranges)


def _take_generation_config(model: Any, path: str) -> None:
    """As ``from_pretrained``."""
    if not model.can_generate():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(path)
    except OSError:
        model.generation_config = GenerationConfig.from_pretrained(
            path, config_file_name="config.json", _from_model_config=True
        )
