"""Rows of the weights in a folder of Hugging Face's, or of its hub, read from safetensors without the rest."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, hub

from ...shards import Shard

_HUB: Any = hub  # without types in part
_COMPARED_BYTES: Final = 64 << 20

Files = dict[str, Any]
"""The open file of each stored tensor, by the tensor's name there."""


def saved_rows(
    model: PreTrainedModel, path: str, rows_of: Callable[[Sequence[int]], Shard]
) -> dict[str, Callable[[], Tensor]] | None:
    """Functions that read the rows ``rows_of(shape)`` of each parameter of ``model`` from ``path``, by its name, in the
    dtype of the file. Buffers of the files and settings of its generation go into ``model``, whose parameters are on
    ``meta``.

    None if that is left to transformers: if it would convert tensors, or names or shapes are not those of ``model``.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        return None
    if any(isinstance(conversion, WeightConverter) for conversion in get_model_conversion_mapping(model)):
        return None
    files = _open_files(path)
    stored = {name: _stored_name(name, model.base_model_prefix, files) for name in model.state_dict()}
    reads: dict[str, Callable[[], Tensor]] = {}
    for names, tensor in _tied_names(model):
        present = [stored_name for name in names if (stored_name := stored[name]) is not None]
        if not present or any(_shape(files, name) != tuple(tensor.shape) for name in present):
            return None
        if not all(_are_equal(files, present[0], other) for other in present[1:]):
            return None
        if tensor.is_meta:
            reads[names[0]] = partial(_read, files[present[0]], present[0], rows_of(tensor.shape))
        else:
            tensor.copy_(files[present[0]].get_tensor(present[0]))
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
    files: Files = {}
    for file_path in paths:
        file: Any = safe_open(file_path, framework="pt", device="cpu")
        files |= dict.fromkeys(file.keys(), file)
    return files


def _stored_name(name: str, prefix: str, files: Files) -> str | None:
    """The name in the files, which may be those of the model without its output layer."""
    names = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((candidate for candidate in names if candidate in files), None)


def _shape(files: Files, name: str) -> tuple[int, ...]:
    return tuple(files[name].get_slice(name).get_shape())


def _read(file: Any, name: str, part: Shard) -> Tensor:
    rows: Tensor = file.get_tensor(name) if part.is_whole else file.get_slice(name)[part.start : part.stop]
    return rows


def _are_equal(files: Files, first: str, second: str) -> bool:
    """Compares two stored tensors that are tied in the model: transformers does not tie them if they differ."""
    shape = _shape(files, first)
    row_bytes = max(1, torch.Size(shape[1:]).numel() * 8)
    rows = max(1, _COMPARED_BYTES // row_bytes)
    slices = [files[name].get_slice(name) for name in (first, second)]
    return all(
        torch.equal(slices[0][start : start + rows], slices[1][start : start + rows])
        for start in range(0, shape[0] if shape else 0, rows)
    )


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
