"""The constructor's argument of the store."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ...core.ref import ActorRef
from ..columns.declared_columns import Column
from ..columns.store_client import ARRAY_COLUMNS
from ..messages import WORK_TIMEOUT_S, ConsoleApi
from ..names import AgentName, PolicyName
from .policy_queue import LeaseOrder
from .schema import Schema
from .segment_arena import ArenaLimits
from .select_pool import SelectLimits

_LIMITS: Final = ArenaLimits()
_SELECT_LIMITS: Final = SelectLimits()


@dataclass(frozen=True, slots=True)
class StoreSetup:
    """A store's tables, folders and limits.

    ``policies``: the policy of each agent; every agent has a table, every policy a queue. ``store_dir``: a folder on a
    disk, for the journal and for segments that memory has no room for. ``max_staleness``: how many versions older than
    its policy a row may be when it is leased. ``order``: in which rows are leased, ``arrival`` or, for runs that are
    ``deterministic``, ``query``. ``columns``: by agent, those that the run declares beyond what training needs.
    ``lease_s``: seconds until the rows of a lease are READY again. ``patience_s``: seconds that a full store waits
    for a row to come or to be consumed, before it refuses a writer. ``selects``: bounds of clients' expressions.
    ``console``: is notified when there is no room, when there is room again, and of a long wait for external
    columns. ``continues``: see ``Judging``.
    """

    policies: dict[AgentName, PolicyName]
    store_dir: Path
    max_staleness: int = 0
    order: LeaseOrder = "arrival"
    columns: dict[AgentName, dict[str, Column]] = field(default_factory=dict)
    limits: ArenaLimits = _LIMITS
    selects: SelectLimits = _SELECT_LIMITS
    lease_s: float = WORK_TIMEOUT_S
    patience_s: float = 1800.0
    console: ActorRef[ConsoleApi] | None = None
    continues: bool = False


def table_schemas(
    policies: Iterable[AgentName], columns: Mapping[AgentName, Mapping[str, Column]]
) -> dict[AgentName, Schema]:
    """The schema of each agent's table. Arguments as in ``StoreSetup``; of ``policies`` only the agents matter."""
    return {agent: Schema({**training_columns(), **columns.get(agent, {})}) for agent in policies}


def training_columns() -> dict[str, Column]:
    """The columns of a sample that the trainer needs; the ``reward`` is in every table."""
    numbers = {
        "advantage": Column(type="float", required=True),
        "group_size": Column(type="int", required=True),
        "temperature": Column(type="float", required=True),
    }
    tokens = Column(type="tokens", required=True)
    arrays = {
        name: tokens if dtype == "int32" else Column(type="tensor", required=True, dtype=dtype, shape=(None,))
        for name, dtype in ARRAY_COLUMNS.items()
    }
    strings = dict.fromkeys(("truncation", "version_changes"), Column(type="str", required=True))
    return {**numbers, **strings, **arrays}
