"""Samples, and the messages of the experience store."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Protocol

from ...core.actor import endpoint
from ..errors import SamplesLost, SelectTimeout, StoreError, TooFewRows, TooManySelects, WriterRetired
from ..names import AgentName, PolicyName, Step
from ..segments.segments import ByteRef, SegmentGrant, WriterMemory
from .rollouts import GroupClosed
from .truncation import Truncation

MOST_VERSION_CHANGES: Final = 16
"""The most version changes within a turn: as many as its policy may be ahead of it when it is trained. They fit the
store's short strings, with token numbers of 7 digits and versions of 6."""

KEPT_STEPS: Final = 16
"""Steps for which the store keeps trained samples, which stay queryable, and takes late ones."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn with its reward: a row of its agent's table.

    ``group`` is ``{step}:{query}`` and ``sample_id`` ``{group}_{turn}_{trajectory}``: unique over the run, also if
    a query comes again. ``advantage`` and ``group_size`` are known when the group closes: the advantage by the agent's
    estimator (``credit/estimator.py``), and the number of rewards that ``reward`` is compared with, itself included:
    the agent's over the surviving trajectories of the group, or over its turns, by its ``Grouping``.
    ``query_position``: the number of its query's draw, over the run. ``columns``: the values that the workflow wrote
    into declared columns (``declared_columns.py``), as plain numbers, strings and arrays.

    ``policy_version`` generated the first token: the oldest version of all. ``version_changes`` are pairs, one behind
    the other: the number of a token and the newer version that generated it and those behind it; empty if one
    version generated all. ``temperature`` and ``truncation``: of the distribution that the tokens were drawn from;
    without a truncation any token could be.
    """

    sample_id: str
    agent: str
    step: int
    policy_version: int
    group: str
    reward: float
    advantage: float
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    group_size: int = 1
    query_position: int = 0
    columns: dict[str, Any] = field(default_factory=dict)
    version_changes: tuple[int, ...] = ()
    temperature: float = 1.0
    truncation: Truncation | None = None

    @property
    def token_versions(self) -> tuple[int, ...]:
        """The version that generated each of ``tokens``."""
        starts = (0, *self.version_changes[::2], len(self.tokens))
        versions = (self.policy_version, *self.version_changes[1::2])
        return tuple(
            v for v, (start, end) in zip(versions, pairwise(starts), strict=True) for _ in range(start, end)
        )


@dataclass(frozen=True, slots=True)
class UnjudgedSample:
    """A sample whose trajectory has ended, and whose reward a program outside the run gives.

    ``number``: of the offer, unique among those of its writer; samples of two evaluations may have the same
    ``sample_id``. ``columns``: the declared ones that the workflow wrote; for judges ``text`` (the answer's),
    ``query_text``, ``temperature``, ``prompt_tokens`` and ``tokens``. Arrays are as ``inline_array`` returns them.
    """

    sample_id: str
    agent: str
    number: int
    policy_version: int
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TableStatistics:
    """Rows by status; ``consumed`` counts rows that an optimizer step used and that are gone."""

    ready: int
    leased: int
    consumed: int


@dataclass(frozen=True, slots=True)
class LeasedBatch:
    """Rows of one policy under a fence, by column, in the order of the policy's queue. The rows may be of several
    agents' tables: ``columns["agent"]`` names each row's agent. A row has None in the columns that its table lacks.
    Columns of token lists and arrays are references (``column_refs.py``)."""

    fence: int
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """``memory_bytes`` and ``disk_bytes``: of segments; ``live_bytes``: what rows refer to."""

    memory_bytes: int
    disk_bytes: int
    live_bytes: int
    journal_bytes: int
    compactions: int


@dataclass(frozen=True, slots=True)
class Selection:
    """``rows``: the first of ``total`` for which the expression is true, as plain data by column name."""

    rows: list[dict[str, Any]]
    total: int


class StoreApi(Protocol):
    """The experience store, as ``store_client.py`` calls it."""

    @endpoint(raises=[StoreError, WriterRetired])
    async def grant(
        self,
        writer: str,
        number: int,
        at_least_bytes: int,
        finished: list[str],
        memory: WriterMemory | None = None,
    ) -> SegmentGrant:
        """A segment for ``writer`` to fill, which writes no more to those that are ``finished``. Waits while there is
        no room. ``number``: of the grants that the writer has got before. The same number again, after a lost answer,
        returns the same segment, also after a restart of the store. ``memory``: of the writer's node; on another node
        than the store's the writer makes the segment there. Raises StoreError if there never will be room,
        WriterRetired if the writer is."""

    @endpoint(raises=[StoreError, WriterRetired])
    async def put(
        self, writer: str, parts: dict[str, dict[str, Any]], report: GroupClosed | None = None
    ) -> None:
        """New rows by agent and column, all or none; acknowledged once they are durable. Refused with the reason: a
        ``sample_id`` that is there already, an unknown column, a wrong type, bytes that are not the writer's, a writer
        that is retired.

        ``report``: of the group whose samples these are; kept with them, for ``retire``, until its step is complete."""

    @endpoint
    async def retire(self, writer: str) -> list[GroupClosed]:
        """The writer is lost: nothing more is accepted from it, and its segments are freed when the last of their rows
        is consumed. Returns the reports that came with its puts, in steps that are not complete.

        Rows whose bytes were in memory of another node than the store's are lost with it. Groups of which no row is
        leased or consumed are discarded: see ``lost_groups``. Rows of the others are leased no more."""

    @endpoint
    async def lost_groups(self, writer: str) -> list[GroupClosed]:
        """The groups of a retired writer that were discarded, and have to begin again."""

    @endpoint
    async def forget_reports(self, step: Step, kept: list[str] | None = None) -> None:
        """All groups of ``step`` have closed but for those of the queries ``kept``: no report of the others is asked
        for any more."""

    @endpoint(raises=[StoreError])
    async def write(self, writer: str, parts: dict[str, dict[str, Any]]) -> None:
        """Further columns of rows that are there, by agent and column (``sample_id`` among them), all or none;
        acknowledged once they are durable. For columns that the config says are ``written_by: external``; a row whose
        required columns are all written is READY. Refused with the reason: a row that is not there (it comes when its
        group is complete), is consumed or has the column already, an unknown column, a wrong type. A ``reward`` is for
        a sample that waits for it, and is written without further columns but ``@offer``, as ``unjudged`` has it."""

    @endpoint(raises=[StoreError])
    async def unjudged(self, agent: AgentName, columns: list[str]) -> dict[str, list[Any]]:
        """At most 1,000 samples of an agent that wait for their reward, by column: ``sample_id``, ``@offer``, and
        ``columns``, of those that ``UnjudgedSample`` has; None if a sample lacks a value. A reward that is written with
        ``@offer`` is for this very answer: it is left out if the sample's group began again meanwhile."""

    @endpoint(raises=[StoreError, WriterRetired])
    async def offer(self, writer: str, samples: list[UnjudgedSample]) -> None:
        """Shows samples to the programs outside the run that give their rewards. May be repeated, and has to be after a
        restart of the store. Refused if the workflow gives the rewards of their agent."""

    @endpoint
    def outside_rewards(self, writer: str) -> AsyncIterator[dict[str, float]]:
        """The rewards of the writer's offered samples, by sample id, as they come."""

    @endpoint
    async def withdraw(self, writer: str, sample_ids: list[str]) -> None:
        """These samples wait no longer: they have their rewards, or their trajectory has failed."""

    @endpoint
    async def give_back(self, policy: PolicyName, fence: int) -> None:
        """The rows leased under ``fence`` are READY again, if the lease is active."""

    @endpoint(raises=[StoreError, TooFewRows, SamplesLost])
    async def lease(self, policy: PolicyName, policy_version: int, count: int) -> LeasedBatch:
        """The oldest ``count`` READY rows of the policy's agents, of that version, or under ``async`` of those that are
        not too stale. Waits for rows that lack only what is ``written_by: external``, as long as the config says.
        Raises TooFewRows if there are fewer, SamplesLost if the bytes of one are lost."""

    @endpoint(raises=[StoreError])
    async def commit(self, policy: PolicyName, fences: list[int], policy_version: int) -> int:
        """The rows leased under ``fences`` are consumed by the optimizer step to ``policy_version``, the policy's next;
        returns how many they are. The same call again changes nothing. Refused if a lease has ended."""

    @endpoint(raises=[StoreError])
    def fetch(self, refs: list[ByteRef]) -> AsyncIterator[bytes]:
        """The bytes of ``refs``, one behind the other, in chunks of 1 MiB, for a reader on another host. Refused if one
        points to no bytes. Leased bytes stay until their lease is committed."""

    @endpoint(raises=[SelectTimeout, TooManySelects, StoreError])
    async def select(self, where: str, limit: int) -> Selection:
        """Rows for which an SQL expression over their scalar columns is true. Few expressions are evaluated at once,
        others wait in order. Raises StoreError for one that is invalid, SelectTimeout if it takes too long,
        TooManySelects if too many wait."""

    @endpoint(raises=[StoreError])
    async def column(self, agent: AgentName, name: str, sample_ids: list[str]) -> dict[str, Any]:
        """One column of samples of ``agent``, by its name, as ``LeasedBatch.columns`` has it: also token lists, tensors
        and long strings. None: not written, or of a sample that was trained already. Refused with the reason: an
        unknown agent, column or sample."""

    @endpoint(raises=[StoreError])
    async def trajectory(self, name: str) -> Selection:
        """The samples of a trajectory in the tables of all agents, turn by turn. ``name``: the trajectory's,
        ``{step}:{query}_{trajectory}``, or the id of one of its samples."""

    async def table_statistics(self) -> dict[str, TableStatistics]:
        """Counts of rows, by agent."""

    async def store_statistics(self) -> StoreStatistics:
        """Bytes of segments, rows and journal now, and the journal's compactions since the store's start."""
