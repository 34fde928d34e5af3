"""The result of a benchmark, as ``--json`` prints it."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from . import machine
from .goals import Goal, judge
from .measure import rounded


def result_of(
    options: Any,
    figures: Mapping[str, float],
    goals: Iterable[Goal] = (),
    described: Mapping[str, Any] | None = None,
    **parts: Any,
) -> dict[str, Any]:
    """The rounded ``figures``, the ``parts`` as they are, the verdicts on ``goals``, and the conditions of the
    measurement.

    ``options``: a dataclass, the settings. ``described``: by ``machine.describe``, before the first round.
    """
    result = {key: rounded(value) for key, value in figures.items()} | parts
    if verdicts := judge(goals, figures):
        result["goals"] = [asdict(verdict) for verdict in verdicts]
    if described is not None:
        result["machine"] = described
    return {**result, "versions": machine.versions(), "settings": asdict(options)}
