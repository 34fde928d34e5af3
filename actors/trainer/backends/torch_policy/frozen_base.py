"""The models that LoRA adapters are trained over: they never change, and a process has its rows of each once."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from ....messages import ModelConfig
from .completion_model import freeze, outlined_model
from .gang_rank import ALONE, GangRank
from .model_rows import Rows
from .own_weights import base_name, is_adapter

_HASHED_BYTES = 64 << 20


class FrozenBase:
    """A rank's rows of a model without gradients, on the config's device in the type that the model computes in. Random
    weights are those of ``seed``.

    ``outline``: the model on ``meta``. ``rows``: by the names of its parameters. ``master_dtype``: of adapters over it.
    """

    def __init__(self, config: ModelConfig, seed: int, gang: GangRank) -> None:
        model, rows = outlined_model(config, seed, gang)
        self.master_dtype: torch.dtype = model.dtype
        self.outline: Any = model
        freeze(model, config)
        self.rows: dict[str, Tensor] = {
            name: rows.pop(name)().to(config.device, parameter.dtype)
            for name, parameter in self.outline.named_parameters()
        }
        self._config, self._seed = config, seed
        self._starts = {
            name: gang.rows(parameter.shape) for name, parameter in self.outline.named_parameters()
        }
        self._is_first = gang.rank_in_replica == 0

    def rows_in(self, model: nn.Module) -> Rows:
        """The rows by their names in ``model``, the outline with an adapter. They are shared, not copied."""
        return {
            name: partial(_same, self.rows[base_name(name)])
            for name, _ in model.named_parameters()
            if not is_adapter(name)
        }

    def plain(self, gang: GangRank) -> dict[str, Any]:
        """All that makes the same base again, and its digest, as plain values for a file. All ranks call this."""
        return {
            "model": self._config.model_dump(mode="json"),
            "seed": self._seed,
            "digest": self.digest(gang),
        }

    def digest(self, gang: GangRank) -> str:
        """A hash of all weights as bfloat16: the same for any number of ranks, and in every type that holds them. All
        ranks of ``gang`` call this."""
        sums = torch.tensor(self._sums, dtype=torch.int64, device=self._config.device)
        names = sorted(self.rows)
        totals = zip(names, gang.sum_of_parts(sums).tolist(), strict=True)
        return joined_digest((name, self._starts[name].shape, total) for name, total in totals)

    @cached_property
    def _sums(self) -> list[int]:
        """For each tensor, by name, the sum of the hashes of this rank's rows, each with its number as the seed: those
        of other ranks can be added. Reads all weights once."""
        sums = []
        for name in sorted(self.rows):
            part = self._starts[name]
            has_rows = self._is_first or not part.is_whole
            sums.append(row_sum(self.rows[name], part.start) if has_rows else 0)
        return sums


def joined_digest(tensors: Iterable[tuple[str, Sequence[int], int]]) -> str:
    """The digest of a base: of the name, the whole shape and the sum over all rows of each tensor, by name."""
    digest = xxhash.xxh3_64()
    for name, shape, total in tensors:
        digest.update(f"{name} {tuple(shape)} {total}".encode())
    return digest.hexdigest()


def row_sum(rows: Tensor, first: int = 0) -> int:
    """The sum of the hashes of ``rows``, the first of which has the number ``first``."""
    total = 0
    for number, data in enumerate(_row_bytes(rows), first):
        total += xxhash.xxh3_64_intdigest(data, number)
    return (total + 2**63) % 2**64 - 2**63  # as torch adds int64


def _row_bytes(rows: Tensor) -> Iterator[memoryview]:
    """The bytes of each row in bfloat16."""
    at_a_time = max(1, _HASHED_BYTES // max(1, 2 * prod(rows.shape[1:])))
    for part in torch.split(rows.detach(), at_a_time) if rows.dim() else (rows.detach().view(1),):
        numbers = part.to(torch.bfloat16).cpu().contiguous().view(len(part), -1)
        for row in numbers.view(torch.uint8).numpy() if numbers.numel() else ():
            yield row.data


def _same(rows: Tensor) -> Tensor:
    return rows


class FrozenBases:
    """The bases of a process, each made at its first use and kept, until a gang needs other rows of it. ``seed``: of
    the run."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._bases: dict[str, tuple[tuple[int, int], FrozenBase]] = {}

    def base_of(self, config: ModelConfig, gang: GangRank = ALONE) -> FrozenBase:
        """The same object for equal configs and the same part of the tensors."""
        key, rank = config.model_dump_json(), (gang.rank_in_replica, gang.replica_size)
        if key not in self._bases or self._bases[key][0] != rank:
            self._bases.pop(key, None)  # before the other rows take memory
            self._bases[key] = rank, FrozenBase(config, config.weights_seed(self._seed), gang)
        return self._bases[key][1]
