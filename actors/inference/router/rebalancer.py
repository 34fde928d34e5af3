"""The moves of instances between policies (inter-agent balancing). Pure: loads and the time in, moves out.

FlexMARL's threshold policy (arXiv 2602.09578, hierarchical load balancing; its threshold is 5): if the backlog per
instance of one policy exceeds another's by more than ``threshold`` turns, an instance of the latter moves to the
former. Three rules keep it calm:

- Each policy keeps ``min_instances``.
- A move pays: the time until both policies' turns are done must shrink by more than ``margin``, although the instance
  generates nothing while it changes weights. That cost is measured, per policy, as a rolling mean.
- A move is not undone at once: it must not leave the giver ahead of the taker, and an instance that has moved stays for
  ``settle`` times the cost of its move.

A policy without an instance gets one of a policy that has several, without regard to these rules, and also if none of
its turns waits: a version of it may have been published, whose trainer waits until an instance serves it.

The time until ``turns`` turns are done by ``n`` instances, each generating ``capacity`` turns at once in ``turn_s``
seconds, is ``turn_s * max(1, turns / (n * capacity))``: turns that all run already are not sped up by one more.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal, TypeVar

from pydantic import field_validator

from ...config_base import Config, Count, Positive, Unit
from ...names import PolicyName
from ...rolling_mean import rolling_mean

Scope = Literal["off", "intra", "intra+inter"]
Key = TypeVar("Key")


class BalanceConfig(Config):
    """The balancing of turns over instances, and of instances over policies."""

    scope: Scope = "intra"
    """`off` deals turns to a policy's instances in turn, `intra` gives each turn to the least busy of them,
    `intra+inter` also moves instances to the policies whose turns wait."""
    threshold: Annotated[Positive, Unit("turns")] = 5.0
    """Difference of two policies in turns per instance from which an instance moves (FlexMARL: 5)."""
    min_instances: Annotated[Count, Unit("instances")] = 1
    """Instances that each policy keeps."""

    @field_validator("scope", mode="before")
    @classmethod
    def _off_in_yaml(cls, scope: object) -> object:
        """YAML reads a bare ``off`` as false."""
        return "off" if scope is False else scope


@dataclass(frozen=True, slots=True)
class MoveRules:
    """``margin``: share of the remaining time that a move must save. ``settle``: stay of an instance that has moved, as
    a multiple of the cost of its move. Both are relative to measured times, so that a config does not have them.
    Tests take them away, to have many moves."""

    margin: float = 0.05
    settle: float = 2.0


_RULES: Final = MoveRules()


@dataclass(frozen=True, slots=True)
class PolicyLoad:
    """The load of one policy now.

    ``instances``: that serve the policy, or will once they have loaded it. ``movable``: of them, those that may leave
    now. ``capacity``: turns that one instance generates at once. ``turns``: waiting and running.
    """

    instances: int
    movable: int
    capacity: int
    turns: int

    @property
    def backlog(self) -> float:
        """Turns per instance."""
        if not self.instances:
            return math.inf if self.turns else 0.0
        return self.turns / self.instances


@dataclass(frozen=True, slots=True)
class Move:
    """One instance of ``giver`` is to serve ``taker``. ``backlogs``: turns per instance of both before the move;
    ``saves_s``: the expected gain, infinite if ``taker`` has no instance; ``costs_s``: the expected seconds without
    generating."""

    giver: PolicyName
    taker: PolicyName
    backlogs: tuple[float, float]
    saves_s: float
    costs_s: float

    @property
    def reason(self) -> str:
        """The backlogs, the gain and the cost as a sentence, for the event that reports the move."""
        of_giver, of_taker = self.backlogs
        if math.isinf(self.saves_s):
            return f"{self.taker} has no instance, {self.giver} {of_giver:.1f} turns per instance"
        return (
            f"{self.taker} has {of_taker:.1f} turns per instance, {self.giver} {of_giver:.1f}: "
            f"saves {self.saves_s:.2g} s at a cost of {self.costs_s:.2g} s"
        )


_NextMove = Callable[[Mapping[PolicyName, PolicyLoad]], Move | None]


class Rebalancer:
    """Decides moves; ``turn_ended`` and ``loaded`` bring the measurements that it needs."""

    def __init__(self, config: BalanceConfig, rules: MoveRules = _RULES) -> None:
        self._config, self._rules = config, rules
        self._turn_s: dict[PolicyName, float] = {}
        self._load_s: dict[PolicyName, float] = {}
        self._move_s: dict[tuple[PolicyName, PolicyName], float] = {}
        self._refused = set[PolicyName]()

    def turn_ended(self, policy: PolicyName, seconds: float) -> None:
        """A turn of ``policy`` has spent ``seconds`` at an instance."""
        _average(self._turn_s, policy, seconds)

    def loaded(self, policy: PolicyName, seconds: float, giver: PolicyName | None = None) -> None:
        """An instance has spent ``seconds`` without generating, until it served weights of ``policy``. ``giver``: the
        policy that it has moved from: another architecture costs more."""
        if giver is None:
            _average(self._load_s, policy, seconds)
        else:
            _average(self._move_s, (giver, policy), seconds)

    def refuse(self, policy: PolicyName) -> None:
        """An instance that has moved to the policy can't load it: no other moves to it."""
        self._refused.add(policy)

    def settle_s(self, giver: PolicyName, taker: PolicyName) -> float:
        """Seconds for which an instance that has moved stays."""
        return self._rules.settle * self._cost_s(giver, taker)

    def _cost_s(self, giver: PolicyName, taker: PolicyName) -> float:
        """The cost of a move; if there was none yet, that of loading a new version."""
        return self._move_s.get((giver, taker), self._load_s.get(taker, 0.0))

    def moves(self, loads: Mapping[PolicyName, PolicyLoad]) -> list[Move]:
        """The moves to begin now, each with the earlier ones counted as done. Empty if ``scope`` is not
        ``intra+inter``."""
        return self._in_order(self._next_move, loads)

    def rescues(self, loads: Mapping[PolicyName, PolicyLoad]) -> list[Move]:
        """The moves that give each policy without an instance one, as far as others have several. Empty as above."""
        return self._in_order(self._next_rescue, loads)

    def _in_order(self, following: _NextMove, loads: Mapping[PolicyName, PolicyLoad]) -> list[Move]:
        if self._config.scope != "intra+inter":
            return []
        remaining = dict(loads)
        moves: list[Move] = []
        while (move := following(remaining)) is not None:
            moves.append(move)
            giver, taker = remaining[move.giver], remaining[move.taker]
            remaining[move.giver] = replace(giver, instances=giver.instances - 1, movable=giver.movable - 1)
            remaining[move.taker] = replace(taker, instances=taker.instances + 1)
        return moves

    def _next_rescue(self, loads: Mapping[PolicyName, PolicyLoad]) -> Move | None:
        """The move for the first policy without an instance, from the policy that has the smallest backlog then."""
        taker = next((p for p, load in loads.items() if not load.instances and p not in self._refused), None)
        backlogs_after = {
            policy: load.turns / (load.instances - 1)
            for policy, load in loads.items()
            if load.movable and load.instances > 1
        }
        if taker is None or not backlogs_after:
            return None
        giver = min(backlogs_after, key=lambda policy: backlogs_after[policy])
        backlogs = loads[giver].backlog, loads[taker].backlog
        return Move(giver, taker, backlogs, math.inf, self._cost_s(giver, taker))

    def _next_move(self, loads: Mapping[PolicyName, PolicyLoad]) -> Move | None:
        """The best move for the policy with the largest backlog."""
        # Without a turn that has ended it is not known how long one takes, nor what a move would save.
        # One without an instance is not helped by a gain: see ``rescues``.
        measured = {
            policy: load
            for policy, load in loads.items()
            if policy in self._turn_s and policy not in self._refused and load.instances
        }
        if not measured:
            return None
        taker = max(measured, key=lambda policy: measured[policy].backlog)
        givers = (self._gain(giver, taker, loads) for giver in loads if giver != taker)
        return max((move for move in givers if move is not None), key=lambda move: move.saves_s, default=None)

    def _gain(
        self, giver: PolicyName, taker: PolicyName, loads: Mapping[PolicyName, PolicyLoad]
    ) -> Move | None:
        """The move from ``giver`` to ``taker``, if the rules allow it."""
        gives, takes = loads[giver], loads[taker]
        if not gives.movable or gives.instances <= self._config.min_instances:
            return None
        if gives.turns and giver not in self._turn_s:
            return None  # the time that its turns take is not known yet
        if takes.backlog - gives.backlog <= self._config.threshold:
            return None
        fewer = replace(gives, instances=gives.instances - 1)
        more = replace(takes, instances=takes.instances + 1)
        if fewer.backlog > more.backlog:  # the move back would be due at once
            return None
        costs_s = self._cost_s(giver, taker)
        before_s = max(self._left_s(giver, gives), self._left_s(taker, takes))
        after_s = max(self._left_s(giver, fewer), self._left_s(taker, more, idle_s=costs_s))
        saves_s = before_s - after_s
        if saves_s <= self._rules.margin * before_s:
            return None
        return Move(giver, taker, (gives.backlog, takes.backlog), saves_s, costs_s)

    def _left_s(self, policy: PolicyName, load: PolicyLoad, idle_s: float = 0.0) -> float:
        """Seconds until all turns are done, if one of the instances begins ``idle_s`` seconds late."""
        if not load.turns:
            return 0.0
        turn_s = self._turn_s[policy]
        # A late instance counts as the turns that it would have done meanwhile.
        lost_turns = load.capacity * idle_s / turn_s
        return turn_s * max(1.0, (load.turns + lost_turns) / (load.instances * load.capacity))


def _average(means: dict[Key, float], key: Key, value: float) -> None:
    means[key] = rolling_mean(means.get(key), value)
