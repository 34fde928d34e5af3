"""Needs and hosts -> a plan. Deterministic; the order of the hosts does not matter.

1. The actors of the head, and those whose GPUs the config names, are on the head.
2. Actors with several GPUs, and gangs, are placed from the largest to the smallest. If each size divides the next
   larger one, any order of hosts fits if one does (Coffman, Garey, Johnson: Bin packing with divisible item sizes,
   1987). For other sizes orders are tried, up to a limit.
3. Actors with one GPU, the largest memory first; then those without GPUs, to the host with the most cores per actor.

Instances are spread: each is placed on the host with the largest share of free GPUs. Gangs are packed: each is placed
on the head if it fits, else on the host where it leaves the fewest free GPUs.

If there are GPUs enough, each has one actor; else an actor that trains and one that generates may share a GPU. A gang
is divided over hosts only if there is no other way to place it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ..host_description import HostDescription
from .capacity import HostCapacity, capacity_of, is_usable
from .infeasible import infeasible_reasons, no_way_found
from .plan import DoesNotFit, Need, Placed, Plan

_MOST_SEARCHED: Final = 300
"""Actors with several GPUs, and gangs, for which other orders are tried: a search is a recursion as deep."""

_MOST_TRIES: Final = 1000
"""Placements that are tried for actors with several GPUs before a run is refused: about a second on 64 hosts."""


def place(
    needs: Sequence[Need], hosts: Sequence[HostDescription], head: str, *, share_gpus: bool = False
) -> Plan:
    """Places all actors. ``head``: the name of the host of the store, the trainer, the orchestrator and the router.
    ``share_gpus``: GPUs may be used although others use them. Raises DoesNotFit."""
    if problems := list(infeasible_reasons(needs, hosts, head, share_gpus=share_gpus)):
        raise DoesNotFit(problems)
    usable = sum(is_usable(gpu, share_gpus) for host in hosts for gpu in host.gpus)
    for sharing in (False, True) if sum(need.gpus for need in needs) <= usable else (True,):
        rooms = [
            capacity_of(host, share_gpus=share_gpus, sharing=sharing)
            for host in sorted(hosts, key=lambda h: h.name)
        ]
        for together in (True, False):
            attempt = _Attempt(rooms, head)
            if attempt.place_all(_units(needs, together)):
                return Plan(
                    {need.actor: attempt.placed[need.actor] for need in needs},
                    tuple(_notes(attempt, hosts, divided=not together and _has_gangs(needs))),
                )
            attempt.give_back()
    raise DoesNotFit([no_way_found(needs, hosts, share_gpus=share_gpus)])


def place_again(
    need: Need,
    hosts: Sequence[HostDescription],
    head: str,
    placements: Sequence[Placed],
    *,
    share_gpus: bool = False,
    alone: bool = False,
) -> Placed | None:
    """A place for one actor beside ``placements``; None if there is no room. Placements on other hosts count for
    nothing. ``alone``: on GPUs without any other actor."""
    for sharing in (False,) if alone else (False, True):
        rooms = [capacity_of(host, share_gpus=share_gpus, sharing=sharing) for host in hosts]
        attempt = _Attempt(rooms, head)
        for placed in placements:
            for room in rooms:
                if room.name == placed.node:
                    room.take(placed)
        for _, (again,) in attempt.choices((need,)):
            return again
    return None


Unit = tuple[Need, ...]
"""Needs that are placed on one host together."""


def _units(needs: Sequence[Need], together: bool) -> list[Unit]:
    """The needs, from the hardest to place to the easiest; a gang is one of them if it is to be ``together``."""
    alone = [need if together else replace(need, gang=None) for need in needs]
    gangs: dict[int, list[Need]] = {}
    units: list[Unit] = []
    for need in alone:
        if need.gang is None:
            units.append((need,))
        else:
            gangs.setdefault(need.gang, []).append(need)
    units += [tuple(gang) for gang in gangs.values()]
    return sorted(units, key=_rank)


def _rank(unit: Unit) -> tuple[bool, bool, int, int, int]:
    on_head = any(need.on_head for need in unit)
    named = any(need.named for need in unit)
    return not on_head, not named, -_gpus(unit), -max(need.gpu_bytes for need in unit), -_memory(unit)


def _gpus(unit: Unit) -> int:
    return sum(need.gpus for need in unit)


def _memory(unit: Unit) -> int:
    return sum(need.memory_bytes for need in unit)


def _has_gangs(needs: Sequence[Need]) -> bool:
    return any(need.gang is not None for need in needs)


@dataclass(slots=True)
class _Attempt:
    """One way to place all; ``placed`` are those that have a place."""

    rooms: list[HostCapacity]
    head: str
    placed: dict[str, Placed] = field(default_factory=dict)
    tries: int = _MOST_TRIES

    def place_all(self, units: Sequence[Unit]) -> bool:
        head = [unit for unit in units if unit[0].on_head]
        large = [unit for unit in units[len(head) :] if _gpus(unit) > 1]
        return (
            all(map(self._place, head))
            and self._place_large(large)
            and all(map(self._place, units[len(head) + len(large) :]))
        )

    def _place_large(self, units: Sequence[Unit]) -> bool:
        """Tries other orders only if the first one fails."""
        if all(map(self._place, units)):
            return True
        for unit in units:
            for need in unit:
                if need.actor in self.placed:
                    self._undo(need.actor)
        return len(units) <= _MOST_SEARCHED and self._search(units, 0)

    def give_back(self) -> None:
        for actor in list(self.placed):
            self._undo(actor)

    def _search(self, units: Sequence[Unit], first: int) -> bool:
        """Tries the hosts for each unit, the best one first; hosts without a difference are one."""
        if first == len(units):
            return True
        tried: set[object] = set()
        for room, placed in self.choices(units[first]):
            if (state := room.state()) in tried:
                continue
            tried.add(state)
            self.tries -= 1
            self._take(room, placed)
            if self._search(units, first + 1):
                return True
            for placement in placed:
                self._undo(placement.need.actor)
            if self.tries <= 0:
                return False
        return False

    def _place(self, unit: Unit) -> bool:
        for room, placed in self.choices(unit):
            self._take(room, placed)
            return True
        return False

    def choices(self, unit: Unit) -> Iterator[tuple[HostCapacity, list[Placed]]]:
        """The hosts that have room for a unit, the best one first."""
        need, gpus = unit[0], _gpus(unit)
        rooms = [
            room
            for room in self.rooms
            if (room.name == self.head or not need.on_head) and room.free[need.purpose] >= gpus
        ]
        keys = {room.name: self._preference(room, need, gpus) for room in rooms}
        while rooms:
            room = min(rooms, key=lambda room: keys[room.name])
            rooms.remove(room)
            if (placed := room.choose(unit)) is not None:
                yield room, placed

    def _preference(self, room: HostCapacity, need: Need, gpus: int) -> tuple[float, float, str]:
        load = room.cores_used / room.cores
        if not gpus:
            beside = self.placed.get(need.beside)
            return float(beside is not None and beside.node != room.name), load, room.name
        if need.purpose == "training":
            # A gang goes where it leaves the fewest free GPUs; single slots fill one host after the other.
            order = room.free["training"] if need.gang is not None else -room.training
            return room.name != self.head, order, room.name
        return room.used_share("generation"), load, room.name

    def _take(self, room: HostCapacity, placed: Sequence[Placed]) -> None:
        for placement in placed:
            room.take(placement)
            self.placed[placement.need.actor] = placement

    def _undo(self, actor: str) -> None:
        placed = self.placed.pop(actor)
        next(room for room in self.rooms if room.name == placed.node).give_back(placed)


def _notes(attempt: _Attempt, hosts: Sequence[HostDescription], divided: bool) -> Iterator[str]:
    for room in attempt.rooms:
        if shared := [gpu.number for gpu in room.gpus if len(set(gpu.holds)) > 1]:
            numbers = ", ".join(map(str, shared))
            yield f"training and generation share GPU {numbers} of {room.name}: there are too few for each alone"
        if room.cores_used > room.cores:
            yield f"{room.name} has {room.cores} cores for {room.cores_used} computing threads: they take turns"
    if divided:
        yield "the ranks of a policy may be on several hosts: none has enough free GPUs for all of them"
    for host in hosts:
        left_out = [gpu for gpu in host.gpus if gpu.users]
        for gpu in left_out:
            yield f"GPU {gpu.index} of {host.name} is used by {', '.join(map(str, gpu.users))}"
