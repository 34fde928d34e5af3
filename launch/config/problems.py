"""Mistakes of a run's configuration that no section can see alone: the checks of sections against each other.

Each check is a function that returns its problem as one line, with the keys in it, or None; ``PROBLEMS`` has all of
them. A mistake within one section is refused by the section's own class.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from .agent_problems import (
    columns_problem,
    credit_and_loss_problem,
    frozen_agent_problem,
    loss_columns_problem,
    past_versions_problem,
    training_problem,
)
from .batch_problems import (
    comparison_problem,
    demonstration_problem,
    gateway_problem,
    global_batch_problem,
    group_size_problem,
    micro_batch_problem,
    query_pool_problem,
    tree_problem,
    updates_problem,
)
from .exploration_problems import explorations_problem, explorer_problem
from .mode_problems import (
    barrier_problem,
    carried_samples_problem,
    draws_problem,
    extra_queries_problem,
    replay_problem,
    sharing_problem,
    staleness_problem,
    timing_problem,
)
from .name_problems import name_problem
from .trainer_problems import gang_problem, network_problem, simulation_problem, weights_path_problem

if TYPE_CHECKING:
    from .run_config import RunConfig


def problems_of(config: "RunConfig") -> list[str]:
    """All of them, in the order of the table."""
    return [problem for check in PROBLEMS if (problem := check(config)) is not None]


PROBLEMS: Final[tuple[Callable[["RunConfig"], str | None], ...]] = (
    name_problem,
    staleness_problem,
    barrier_problem,
    carried_samples_problem,
    extra_queries_problem,
    replay_problem,
    sharing_problem,
    timing_problem,
    draws_problem,
    micro_batch_problem,
    global_batch_problem,
    updates_problem,
    group_size_problem,
    query_pool_problem,
    comparison_problem,
    tree_problem,
    demonstration_problem,
    explorations_problem,
    explorer_problem,
    gateway_problem,
    training_problem,
    frozen_agent_problem,
    past_versions_problem,
    credit_and_loss_problem,
    columns_problem,
    loss_columns_problem,
    simulation_problem,
    gang_problem,
    network_problem,
    weights_path_problem,
)
