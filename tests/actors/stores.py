"""Stores for tests."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from flexmarl.actors.columns.declared_columns import Column
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.store.store_setup import StoreSetup

SOLVER: Final = PolicyName("solver")
JUDGE: Final = PolicyName("judge")


def policies(agents: Iterable[str]) -> dict[AgentName, PolicyName]:
    """A policy of its own, of the same name, for each agent."""
    return {AgentName(agent): PolicyName(agent) for agent in agents}


def store_setup(
    agents: Iterable[str],
    store_dir: str | Path,
    *,
    columns: Mapping[str, dict[str, Column]] | None = None,
    **options: Any,
) -> StoreSetup:
    declared = {AgentName(agent): own for agent, own in (columns or {}).items()}
    options = {"policies": policies(agents), "columns": declared, **options}
    return StoreSetup(store_dir=Path(store_dir), **options)
