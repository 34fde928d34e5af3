"""The queries' part of a checkpoint."""

from dataclasses import dataclass, field, replace
from typing import Any

from ...names import Step


@dataclass(frozen=True, slots=True)
class QueriesState:
    """The queries of a run after a step, without anything of later ones.

    ``drawn``: number of queries that were drawn from the recipe's source. ``positions``: the state of ``train_query``'s
    ``PositionSource``; empty at the beginning. ``source``: the state of the recipe's own source, None without one.
    ``evaluation``: the digest of the evaluation's queries, empty without an evaluation. ``logged``: the step of each
    group of logged trajectories that is trained: its name is not trained again. ``success_state``: of the
    ``SuccessModel``, None in a run whose trees do not predict.
    """

    drawn: int = 0
    positions: dict[str, Any] = field(default_factory=dict)
    source: dict[str, Any] | None = None
    evaluation: str = ""
    logged: dict[str, Step] = field(default_factory=dict)
    success_state: list[float] | None = None

    def without_digests(self) -> "QueriesState":
        """The state of a run that continues with changed data."""
        positions = {**self.positions, "digests": []} if self.positions else {}
        return replace(self, positions=positions, evaluation="")
