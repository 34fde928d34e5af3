"""Measured peaks of the ranks of a policy beside those that the memory plan predicts for each of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.trainer.rank_bytes import RankBytes, RankLoad, logits_limit, rank_bytes
from flexmarl.launch.bench.goals import Goal
from flexmarl.launch.hosts.placement.model_memory import shape_of_model

from .memory_peaks import MemoryPeaks

TWO_HOSTS: Final = "two_hosts_"
REPLICAS: Final = "replicas_"
"""The begins of the keys of figures of ranks on two hosts, and in two replicas."""

PHASES: Final = {
    "build": ("draw", "build"), "resume": ("resume",), "forward": ("forward",), "publish": ("publish",),
}  # fmt: skip
"""The phases of a plan, and the measured ones that each of them predicts."""

_MOST: Final = 1.10


def ratio_goals(prefix: str = "") -> tuple[Goal, ...]:
    """``prefix``: of the figures' keys."""
    place = {"": "", TWO_HOSTS: "two hosts: ", REPLICAS: "two replicas: "}[prefix]
    return tuple(
        Goal(
            f"{prefix}{phase}_peak_ratio",
            f"{place}peak of a rank, {phase}, of the plan's",
            _MOST,
            at_most=True,
        )
        for phase in PHASES
    )


def predict(model: Mapping[str, Any], ranks: int, tokens: int, replicas: int = 1) -> RankBytes:
    """The plan of a rank of the policy that ``measure_memory`` makes of such a model."""
    shape = shape_of_model(ModelConfig(config=dict(model), tokenizer="unused"))
    assert shape is not None, "transformers can build the model"
    load = RankLoad(ranks, tokens, item_bytes=2, logits_bytes=logits_limit(None), has_checkpoints=True)
    return rank_bytes(shape, replace(load, replicas=replicas))


def ratios(peaks: MemoryPeaks, predicted: RankBytes, prefix: str = "") -> dict[str, float]:
    """The largest of all ranks, of each phase; and the share of the model that a rank had beyond its rows."""
    figures = {
        f"{prefix}{phase}_peak_ratio": max(
            size for name in measured for size in getattr(peaks, f"{name}_peak_bytes")
        )
        / getattr(predicted, phase)
        for phase, measured in PHASES.items()
    }
    return {**figures, f"{prefix}whole_model_share": max(peaks.shares.values())}
