"""The live instances that the router knows, by number and by name. Pure."""

from collections.abc import Iterator, Mapping

from ...names import PolicyName
from .waiting_turns import InstanceLoad, InstancesWithRoom, RoutedInstance


class LiveInstances:
    """Each instance has a number for each policy that it serves at the same time; its next life has others."""

    def __init__(self) -> None:
        self._by_number: dict[int, RoutedInstance] = {}
        self._incarnations: dict[int, InstanceLoad] = {}
        """By the numbers of all their parts, also of those that have left."""
        self._by_name: dict[str, InstanceLoad] = {}
        self._all_names: set[str] = set()
        # Numbers are never given again: a late message about an earlier life of an instance finds nothing.
        self._numbers = 0

    def add(
        self, name: str, capacity: int, rooms: Mapping[PolicyName, InstancesWithRoom]
    ) -> list[RoutedInstance]:
        """An instance that has started, as each of its policies has it. ``rooms``: of its policies. An earlier one of
        the same name must have left."""
        state_reason = "it was started again" if name in self._all_names else "it has joined"
        self._all_names.add(name)
        first = self._numbers + 1
        self._numbers += len(rooms)
        load = self._by_name[name] = InstanceLoad(capacity, tuple(range(first, self._numbers + 1)))
        for number, (policy, room) in zip(load.numbers, rooms.items(), strict=True):
            self._incarnations[number] = load
            self._by_number[number] = RoutedInstance(number, name, policy, load, room)
            self._by_number[number].state_reason = state_reason
        return list(load.parts)

    def remove(self, instance: RoutedInstance) -> None:
        """The instance serves its policy no more; the turns that it had of it are no longer counted."""
        load = instance.load
        load.parts.remove(instance)
        load.add(-len(instance.turns), -sum(turn.tokens for turn in instance.turns.values()))
        instance.turns = {}
        del self._by_number[instance.number]
        if not load.parts:
            del self._by_name[instance.name]
            for number in load.numbers:
                del self._incarnations[number]

    def __iter__(self) -> Iterator[RoutedInstance]:
        # Of a copy: what is done to an instance may remove it.
        return iter(list(self._by_number.values()))

    def __getitem__(self, number: int) -> RoutedInstance:
        return self._by_number[number]

    def get(self, number: int) -> RoutedInstance | None:
        """The instance of this number, as one of its policies has it; None if it is gone."""
        return self._by_number.get(number)

    def parts(self, number: int) -> list[RoutedInstance]:
        """The instance that has this number among others, as each of its policies has it; empty if it is gone."""
        load = self._incarnations.get(number)
        return [] if load is None else list(load.parts)

    def named(self, name: str) -> list[RoutedInstance]:
        """The instance of that name, as each of its policies has it; empty for an unknown name."""
        load = self._by_name.get(name)
        return [] if load is None else list(load.parts)

    def first_number(self, number: int) -> int | None:
        """The first of all numbers of an instance; None if it is gone."""
        load = self._incarnations.get(number)
        return None if load is None else load.numbers[0]
