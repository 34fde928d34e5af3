"""Candidates of a plan: the ways in which a number of devices can be divided over instances and training. Pure.

A candidate has as few numbers as the choice needs. Policies with the same model have the same devices of an instance
and the same ranks; those of several models grow together, by powers of two over the fewest that fit the memory.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ....actors.names import PolicyName

Widths = Mapping[PolicyName, int]
"""Devices of an instance, or ranks, by policy."""

_MICRO_BATCHES: Final = (1, 2, 0.5)


@dataclass(frozen=True, slots=True)
class PolicyRoom:
    """The numbers that a policy may have. ``tensor_parallel``, ``ranks``: rising, all of which fit the memory.
    ``load_s``: seconds of a step that one device of an instance would need for its turns; 0 ranks: it is frozen."""

    tensor_parallel: Sequence[int]
    ranks: Sequence[int]
    load_s: float
    turns: int


@dataclass(frozen=True, slots=True)
class Space:
    """Everything that is searched. ``samples``: of a step. ``balances``: values of ``balance.scope``."""

    devices: int
    policies: Mapping[PolicyName, PolicyRoom]
    micro_batch: int
    samples: int
    balances: Sequence[str]


@dataclass(frozen=True, slots=True)
class Candidate:
    """``slots``: of the shared pool."""

    instances: tuple[tuple[PolicyName, int], ...]
    tensor_parallel: tuple[tuple[PolicyName, int], ...]
    ranks: tuple[tuple[PolicyName, int], ...]
    slots: int
    micro_batch: int
    balance: str

    @property
    def split(self) -> tuple[object, ...]:
        """The division of the devices: candidates of one split differ in the rest."""
        return (self.tensor_parallel, self.ranks, self.slots)

    @property
    def devices(self) -> int:
        """The devices that it uses."""
        return self.slots + sum(
            count * width for (_, count), width in zip(self.instances, self.widths, strict=True)
        )

    @property
    def widths(self) -> list[int]:
        """Devices of an instance of each policy. One that may move has those of the widest."""
        sizes = [size for _, size in self.tensor_parallel]
        return [max(sizes)] * len(sizes) if moves(self.balance) else sizes

    def text(self) -> str:
        """The numbers, in a few words."""
        return (
            f"instances {_together(self.instances)} x {_together(self.tensor_parallel)} devices, {self.slots} slots, "
            f"ranks {_together(self.ranks)}, micro-batch {self.micro_batch}, balance {self.balance}"
        )

    def differences(self, other: "Candidate") -> int:
        """The number of choices in which two candidates differ."""
        pairs = (
            (self.tensor_parallel, other.tensor_parallel), (self.ranks, other.ranks), (self.slots, other.slots),
            (self.micro_batch, other.micro_batch), (self.balance, other.balance),
        )  # fmt: skip
        return sum(mine != theirs for mine, theirs in pairs)


def moves(balance: str) -> bool:
    """True if instances may move between policies."""
    return balance == "intra+inter"


def candidates(space: Space) -> Iterator[Candidate]:
    """All of them, each once. None if the devices are too few for an instance and the ranks of each policy."""
    seen: set[Candidate] = set()
    micro_batches = [
        size
        for factor in _MICRO_BATCHES
        if 1 <= (size := int(space.micro_batch * factor)) <= max(space.samples, space.micro_batch)
    ]
    for sizes, ranks in itertools.product(
        _levels({name: room.tensor_parallel for name, room in space.policies.items()}),
        _levels({name: room.ranks for name, room in space.policies.items() if room.ranks}),
    ):
        for slots, balance in itertools.product(_slots(ranks), space.balances):
            instances = _instances(space, sizes, space.devices - slots, moves(balance))
            if instances is None:
                continue
            for micro_batch in micro_batches:
                candidate = Candidate(
                    instances, tuple(sizes.items()), tuple(ranks.items()), slots, micro_batch, balance
                )
                if candidate not in seen:
                    seen.add(candidate)
                    yield candidate


def _levels(choices: Mapping[PolicyName, Sequence[int]]) -> Iterator[Widths]:
    """The smallest number of each policy, then the next of each, as far as it has one."""
    for level in range(max((len(numbers) for numbers in choices.values()), default=1)):
        yield {name: numbers[min(level, len(numbers) - 1)] for name, numbers in choices.items()}


def _slots(ranks: Widths) -> list[int]:
    """Multiples of the largest gang, up to slots of its own for each policy."""
    most, whole = max(ranks.values(), default=0), sum(ranks.values())
    return sorted({whole, *range(most, whole, most)}) if most else [0]


def _instances(
    space: Space, sizes: Widths, devices: int, moving: bool
) -> tuple[tuple[PolicyName, int], ...] | None:
    """Divides devices by the policies' loads; each policy has at least one instance, and at most one for each turn.
    None if there are too few."""
    widths = dict.fromkeys(sizes, max(sizes.values())) if moving else sizes
    counts = dict.fromkeys(widths, 1)
    rest = devices - sum(widths.values())
    if rest < 0:
        return None
    loads = {name: max(space.policies[name].load_s, 1e-12) for name in widths}
    while True:
        growing = [
            name
            for name, width in widths.items()
            if width <= rest and counts[name] < space.policies[name].turns
        ]
        if not growing:
            return tuple(counts.items())
        name = max(growing, key=lambda name: loads[name] / (counts[name] * widths[name]))
        counts[name] += 1
        rest -= widths[name]


def _together(numbers: Sequence[tuple[PolicyName, int]]) -> str:
    """``22`` if all have it; ``4+2+1`` else."""
    values = [number for _, number in numbers]
    return str(values[0]) if len(set(values)) == 1 else "+".join(map(str, values))
