"""Sampling in evaluations, as the config and the rollout know it."""

from typing import Annotated

from pydantic import model_validator

from ..config_base import Config, Count, NonNegative, Unit


class EvaluationSampling(Config):
    """The sampling of an evaluation."""

    temperature: NonNegative | None = 0.0
    """Temperature of all agents' turns. 0 is greedy decoding, `null` each agent's own `sampling.temperature`."""
    repeats: Annotated[Count, Unit("trajectories")] = 1
    """Trajectories for each query. With more than one, metrics are means over them, and pass@k is given for k = 1, 2,
    4, ... and all."""

    @model_validator(mode="after")
    def _repeats_differ(self) -> "EvaluationSampling":
        if self.repeats > 1 and self.temperature == 0:
            raise ValueError(
                f"repeats={self.repeats} with temperature=0: greedy decoding repeats the same answer; set "
                "evaluation.temperature"
            )
        return self
