"""Sources of training queries: each gives queries and hears how their groups ended.

    step k begins ──> closed(group) ...   every group that has ended since the step before began, in the order of their
         │                                queries
         ├──> state()                     if step k - 1 has a checkpoint
         ├──> next(k) ...                 the queries of the step
         └──> figures()                   for the step's metrics

    a group of step k is replaced ──> next(k)

``RunQueries`` makes the calls, one after another. The results come when a step begins, not as they arrive, because
their arrival differs from run to run: under ``strict`` and ``sync`` all groups of the earlier steps have ended by then,
so the calls, and with them the queries, are the same in every run with the same results. Under ``async`` a step may
begin before the groups of earlier ones have ended, which are then heard of later.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from ..messages import Query
from ..names import AgentName, PolicyName, Step, Version


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """The end of a query's group."""

    query: Query
    step: Step
    versions: dict[PolicyName, Version]
    """Those that the step began with."""
    rewards: dict[AgentName, list[float]]
    """Those of the trajectories that count; empty lists, or none, if there is no such trajectory."""
    metrics: dict[str, list[float]]
    """The workflow's own, of the same trajectories, by name."""
    success: float | None
    """The share of these trajectories that solved the query: ``evaluation.success`` was at least 1. None if none of
    them has that metric."""
    failures: int
    """The number of the trajectories that failed."""
    dropped: str = ""
    """The reason if no sample of the group is trained, or empty. A query that was left out, as a submitted one of its
    step has its id, has one too."""
    filtered: dict[str, dict[AgentName, int]] = field(default_factory=dict)
    """By filter of ``rollout.filters`` and agent: the samples that it left out."""


class QuerySource(ABC):
    """Gives the training queries of a run, and hears how their groups ended.

    The orchestrator calls the methods in a thread, one at a time; all that one draw needs within
    ``training.data_timeout_s``. ``next`` may depend on the arguments of ``query_source``, on the earlier calls and on
    the state that was restored, but not on the time or on random numbers without a seed of its own: then a resumed run
    gets the queries that it would have got without the interruption.
    """

    @abstractmethod
    def next(self, step: int) -> Query:
        """The next query of ``step``, with an id that no other one of the step has."""

    def closed(self, group: GroupEnd) -> None:  # noqa: B027  # a source need not hear
        """Takes note of how the group of an earlier query ended. Each is heard of once."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that ``restore`` needs, for the checkpoint: dictionaries with string keys, lists, strings, numbers,
        booleans and None. The state of the positions that ``query_source`` gets is saved apart, and not a part of it.
        """

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Continues from what ``state`` has returned. Called before all other methods, in a run that is resumed."""

    def figures(self) -> dict[str, float]:
        """Figures of the run until now by name, for the metrics of the step whose queries were just drawn."""
        return {}
