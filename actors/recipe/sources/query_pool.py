"""A pool of queries, from which a rule chooses by how their groups have ended.

    positions ──fill, and fresh ones now and then──> candidates ──rule.choose──> next
                                                         ^                          │
                                    Belief.after ────────┴───── closed(group) <─────┘

A candidate that is under way is not given again before its group has ended, so that no query is twice in a step. If all
are under way, another query of the training data joins. The one of the least value leaves when a fresh one joins.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Annotated, Any

from ...config_base import Count, Share, Unit
from ...messages import Query
from ..query_source import GroupEnd, QuerySource
from .belief import Belief
from .packed_query import pack_query, unpack_query
from .source_options import SourceOptions


class Rule(ABC):
    """Chooses among candidates by their beliefs. Pure: it has no state."""

    @abstractmethod
    def choose(self, beliefs: Sequence[Belief], random: Random) -> int:
        """The number of the candidate that is given next; there is one at least."""

    @abstractmethod
    def value(self, belief: Belief) -> float:
        """The worth of a candidate that stays in the pool, greater for one that teaches more."""


class PoolOptions(SourceOptions):
    """The settings that all sources with a pool have."""

    pool: Annotated[Count, Unit("queries")] = 256
    """Queries that the source chooses from: those of the first positions of `train_query`. For a data set that is
    not larger, its size."""
    fresh: Share = 0.1
    """Share of the queries that are those of later positions. They join the pool, and the one that teaches the least
    leaves it. 0 for a data set that is the pool."""
    decay: Share = 0.5
    """Weight that a query's earlier groups keep when a newer one ends."""
    drift: Share = 0.98
    """Weight that a group keeps after each step: the policy has changed."""

    def rule(self) -> Rule:
        """Chooses among the candidates."""
        raise NotImplementedError

    def source(self, positions: QuerySource, seed: int) -> QuerySource:
        return PoolSource(positions, self.rule(), self, seed)


@dataclass(slots=True)
class _Candidate:
    """``packed``: the query in the state. ``under_way``: the number of its groups that have not ended."""

    query: Query
    packed: str
    belief: Belief
    under_way: int = 0
    was_given: bool = False


class PoolSource(QuerySource):
    """Gives the queries that a rule chooses from a pool of them.

    A query that is given again has the text and the data that it had, and an id of its own, as with ``ReplaySource``.
    """

    def __init__(self, positions: QuerySource, rule: Rule, options: PoolOptions, seed: int) -> None:
        """``positions``: the source that the pool is filled from."""
        self._positions, self._rule, self._options, self._seed = positions, rule, options, seed
        self._candidates: dict[str, _Candidate] = {}
        """By the id of the query, in the order in which they have joined."""
        self._open: dict[str, str] = {}
        """The ids of the candidates under way, by those with which they were given."""
        self._is_filled = False
        self._credit = 0.0
        self._draws = self._repetitions = 0

    def next(self, step: int) -> Query:
        if not self._is_filled:
            for _ in range(self._options.pool):
                self._join(step)
            self._is_filled = True
        candidate = self._take_fresh(step) or self._choose(step) or self._take_other(step)
        return self._give(candidate)

    def closed(self, group: GroupEnd) -> None:
        if (name := self._open.pop(group.query.id, None)) is None:
            return
        if group.query.id == name:
            self._positions.closed(group)
        candidate = self._candidates[name]
        candidate.under_way -= 1
        share, trajectories = share_solved(group)
        if trajectories:
            decay, drift = self._options.decay, self._options.drift
            candidate.belief = candidate.belief.after(
                share, trajectories, group.step, decay=decay, drift=drift
            )

    def state(self) -> dict[str, Any]:
        return {
            "positions": self._positions.state(),
            "candidates": [
                [
                    candidate.packed,
                    candidate.belief.solved,
                    candidate.belief.failed,
                    candidate.belief.step,
                    candidate.belief.groups,
                    candidate.under_way,
                    candidate.was_given,
                ]
                for candidate in self._candidates.values()
            ],
            "open": dict(self._open),
            "filled": self._is_filled,
            "credit": self._credit,
            "draws": self._draws,
            "given_again": self._repetitions,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._positions.restore(state["positions"])
        for packed, solved, failed, step, groups, under_way, was_given in state["candidates"]:
            query = unpack_query(packed)
            belief = Belief(solved, failed, step, groups)
            self._candidates[query.id] = _Candidate(query, packed, belief, under_way, was_given)
        self._open, self._is_filled = dict(state["open"]), state["filled"]
        self._credit, self._draws, self._repetitions = state["credit"], state["draws"], state["given_again"]

    def figures(self) -> dict[str, float]:
        """The size of the pool, the queries of the run that were given again, and the mean chance that a trajectory
        solves a query of the pool, over those that have had a group."""
        means = [candidate.belief.mean for candidate in self._candidates.values() if candidate.belief.groups]
        success = {"success": fmean(means)} if means else {}
        return {
            **self._positions.figures(),
            "pool": len(self._candidates),
            "given_again": self._repetitions,
            **success,
        }

    # ------------------------------------------------------------------ candidates

    def _join(self, step: int) -> _Candidate | None:
        """The next query of the training data as a candidate; None if it is one already, as in a second epoch."""
        query = self._positions.next(step)
        if query.id in self._candidates:
            return None
        candidate = self._candidates[query.id] = _Candidate(query, pack_query(query), Belief(step=step))
        return candidate

    def _take_fresh(self, step: int) -> _Candidate | None:
        # At most one is saved up, as in ReplaySource.
        self._credit = min(self._credit + self._options.fresh, 1.0)
        if self._credit < 1.0:
            return None
        self._credit -= 1.0
        candidate = self._join(step)
        if candidate is not None and len(self._candidates) > self._options.pool:
            self._leave(candidate)
        return candidate

    def _leave(self, newest: _Candidate) -> None:
        leaving = [
            candidate
            for candidate in self._candidates.values()
            if candidate is not newest and not candidate.under_way
        ]
        if leaving:  # min takes the oldest of equal ones
            least = min(leaving, key=lambda candidate: self._rule.value(candidate.belief))
            del self._candidates[least.query.id]

    def _choose(self, step: int) -> _Candidate | None:
        ready = [candidate for candidate in self._candidates.values() if not candidate.under_way]
        if not ready:
            return None
        beliefs = [candidate.belief.at(step, self._options.drift) for candidate in ready]
        self._draws += 1
        # A generator of its own for each draw: its state is a number, and not 625 of them.
        return ready[self._rule.choose(beliefs, Random(f"{self._seed} {self._draws}"))]

    def _take_other(self, step: int) -> _Candidate:
        """A candidate beyond the pool, or one that is under way if the training data has no other."""
        return self._join(step) or next(iter(self._candidates.values()))

    def _give(self, candidate: _Candidate) -> Query:
        query = candidate.query
        if candidate.was_given:
            self._repetitions += 1
            query = replace(query, id=f"{query.id}#{self._repetitions}")
        candidate.was_given = True
        candidate.under_way += 1
        self._open[query.id] = candidate.query.id
        return query


def share_solved(group: GroupEnd) -> tuple[float, int]:
    """The share of the group's trajectories that have solved the query, and their number, which is 0 if nothing is
    known.

    Without the metric of ``evaluation.success`` it is the mean of the agents' rewards, each between 0 and 1.
    """
    values = [rewards for rewards in group.rewards.values() if rewards]
    trajectories = max(map(len, [*values, *group.metrics.values()]), default=0)
    if group.success is not None:
        return group.success, trajectories
    if not values:
        return 0.0, 0
    return fmean(min(1.0, max(0.0, fmean(rewards))) for rewards in values), trajectories
