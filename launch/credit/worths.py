"""The worth of coalitions, from the recorded trajectories of their evaluations."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import numpy as np

from ...actors.errors import ConfigError
from ...actors.recorded_trajectory import RecordedTrajectory
from ..run_folder.samples.reader import Samples
from .shapley import Coalition, Worth


def worths_of(folders: Mapping[Coalition, Path], metric: str) -> tuple[dict[Coalition, Worth], int]:
    """The worth of each coalition by query, the mean over the query's trajectories, and the number of queries that are
    left out, as one of the evaluations has no trajectory of them that ended well.

    ``metric``: a metric of the workflow, ``reward/<agent>``, or ``reward``, the mean over the agents' rewards. Raises
    ConfigError if no trajectory has it, SamplesUnreadable."""
    by_query = {coalition: _by_query(folder, metric) for coalition, folder in folders.items()}
    queries = set.intersection(*(set(values) for values in by_query.values()))
    all_queries = set.union(*(set(values) for values in by_query.values()))
    if not queries:
        raise ConfigError(f"--metric {metric}: no query has this figure in all evaluations")
    order = sorted(queries)
    return {
        coalition: np.array([values[query] for query in order]) for coalition, values in by_query.items()
    }, len(all_queries) - len(queries)


def _by_query(folder: Path, metric: str) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    with Samples(folder) as samples:
        for trajectory in samples.trajectories(evaluation=True, failed=False):
            if (value := _value(trajectory, metric)) is not None:
                values[trajectory.query.id].append(value)
    return {query: fmean(numbers) for query, numbers in values.items()}


def _value(trajectory: RecordedTrajectory, metric: str) -> float | None:
    if metric == "reward":
        return trajectory.reward
    of, _, agent = metric.partition("/")
    return trajectory.rewards.get(agent) if of == "reward" and agent else trajectory.metrics.get(metric)
