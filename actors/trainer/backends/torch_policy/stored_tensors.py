"""The tensors of a model in safetensors files: each by its name in the model, read in rows.

Names in files may be others than those of the model, and the experts of a layer, which the model has as one tensor, may
be stored one by one. transformers has the table of these conversions and renames each stored name; the rows are read
here, because transformers would load and merge all experts before a rank could take its own.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ...shards import Shard, whole

Files = Mapping[str, Any]
"""The open safetensors file of each stored tensor, by the tensor's name there."""

_PLAIN: Final = ""


class StoredTensor(Protocol):
    """A tensor of the model, in files."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, part: Shard) -> Tensor:
        """Its rows, in the dtype of the file."""


@dataclass(frozen=True, slots=True)
class _Plain:
    """A tensor that a file has as the model has it."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    def read(self, part: Shard) -> Tensor:
        tensor: Tensor = (
            self.file.get_tensor(self.name)
            if part.is_whole
            else self.file.get_slice(self.name)[part.start : part.stop]
        )
        return tensor


@dataclass(frozen=True, slots=True)
class _Experts:
    """A tensor with a row for each expert. ``columns``: the tensors of all experts, by the matrices of a row."""

    columns: tuple[tuple[_Plain, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [column[0].shape for column in self.columns]
        return (len(self.columns[0]), sum(shape[0] for shape in shapes), *shapes[0][1:])

    def read(self, part: Shard) -> Tensor:
        first = self.columns[0][0]
        rows = torch.empty(part.own_shape, dtype=first.read(Shard(first.shape, 0, 0)).dtype)
        for row, expert in zip(rows, range(part.start, part.stop), strict=True):
            torch.cat([column[expert].read(whole(column[expert].shape)) for column in self.columns], out=row)
        return rows


def stored_tensors(model: PreTrainedModel, files: Files) -> dict[str, StoredTensor] | None:
    """The tensors of ``model`` that ``files`` have. None if transformers would convert one of them in another way than
    to merge experts."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    state = model.state_dict()
    prefix = model.base_model_prefix
    sources: dict[str, dict[str, list[_Plain]]] = defaultdict(lambda: defaultdict(list))
    for stored in sorted(files, key=dot_natural_key):
        name, pattern = rename_source_key(stored, renamings, converters, prefix, state)
        if name not in state:
            name, pattern = rename_source_key(stored, [], [], prefix, state)
        if name in state:
            sources[name][pattern or _PLAIN].append(_Plain(files[stored], stored))
    tensors: dict[str, StoredTensor] = {}
    for name, parts in sources.items():
        tensor = _join(parts, converter_of)
        if tensor is None:
            return None
        tensors[name] = tensor
    return tensors


def _join(
    parts: Mapping[str, Sequence[_Plain]], converter_of: Mapping[str, WeightConverter]
) -> StoredTensor | None:
    """Makes one tensor of the model from its stored ones, by the patterns of their names."""
    if parts.keys() == {_PLAIN}:
        return parts[_PLAIN][0]
    converter = converter_of.get(next(iter(parts)))
    if converter is None or not _merges_experts(converter) or parts.keys() != set(converter.source_patterns):
        return None
    columns = tuple(tuple(parts[pattern]) for pattern in converter.source_patterns)
    if len({len(column) for column in columns}) != 1:
        return None
    if any(tensor.shape != column[0].shape for column in columns for tensor in column):
        return None
    return _Experts(columns)


def _merges_experts(converter: WeightConverter) -> bool:
    """True if the experts are stacked, and before that each expert's matrices laid end to end: once the experts are
    stacked, these lie along the second dimension."""
    steps = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
    if len(converter.source_patterns) == 1:
        return steps == [(MergeModulelist, 0)]
    return steps == [(MergeModulelist, 0), (Concatenate, 1)]
