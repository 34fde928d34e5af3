"""Groups of other runs that wait for a step of this one: drawn by weight of their origin and age. Pure.

    add(origin, group) ──> kept, if its rewards differ ──> take(step) ──> trained, once
                                 │                    └──> too old: forgotten
                                 └──> beyond ``limit``: the oldest is forgotten

A group's weight is ``weight of its origin * decay ** age``; groups are drawn without replacement (Efraimidis and
Spirakis, Weighted random sampling with a reservoir, 2006: the largest ``u ** (1 / weight)``). SAPO (Amico et al.,
arXiv 2509.08721) leaves out groups without an advantage and draws the others uniformly: weights of 1 and a decay of 1.
Its nodes compute rewards again; here a group keeps the rewards of its run, whose task is the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from .shared_group import SharedGroup
from .sharing_config import SharingConfig


@dataclass(frozen=True, slots=True, eq=False)
class WaitingGroup:
    """``came``: this run's step at which the group came."""

    origin: str
    group: SharedGroup
    came: int


class SharedPool:
    """``waiting``: in the order in which they came."""

    def __init__(self, config: SharingConfig, queries: int, seed: int) -> None:
        """``queries``: of a step."""
        self._config, self._queries, self._seed = config, queries, seed
        self.waiting: list[WaitingGroup] = []
        self._newest: dict[str, int] = {}
        self._credit = 0.0

    def add(self, origin: str, group: SharedGroup, step: int) -> bool:
        """Adds a group that came at ``step`` of this run. False for one whose rewards teach nothing."""
        self._newest[origin] = max(group.newest, self._newest.get(origin, 0))
        if not _differ([line["reward"] for line in group.lines]):
            return False
        self.waiting.append(WaitingGroup(origin, group, step))
        del self.waiting[: -self._config.limit]
        return True

    def take(self, step: int) -> list[WaitingGroup]:
        """The groups for the step after ``step``. They wait no more."""
        config = self._config
        self.waiting = [group for group in self.waiting if self.age(group, step) <= config.max_age]
        due = self._credit + config.share * self._queries
        random = Random(f"{self._seed} sharing {step}")
        keys = {group: self._key(group, step, random) for group in self.waiting}
        picks = sorted(self.waiting, key=lambda group: keys[group], reverse=True)[: int(due)]
        self._credit = min(due - len(picks), 1.0)
        self.waiting = [group for group in self.waiting if group not in picks]
        return picks

    def age(self, group: WaitingGroup, step: int) -> int:
        """Steps that its own run, or this one, has made since then: a run that has gone away makes none."""
        return max(self._newest[group.origin] - group.group.step, step - group.came)

    def _key(self, group: WaitingGroup, step: int, random: Random) -> float:
        weight = self._config.peers[group.origin].weight * self._config.decay ** self.age(group, step)
        return random.random() ** (1 / weight) if weight else 0.0


def _differ(rewards: list[Mapping[str, float]]) -> bool:
    return any(len({of_line.get(agent) for of_line in rewards}) > 1 for agent in rewards[0])
