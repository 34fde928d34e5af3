"""Sampling in evaluations, as the config and the rollout know it."""

from pydantic import model_validator

from ..config_base import Config, Count, NonNegative


class EvaluationSampling(Config):
    """``temperature`` of all agents' turns: 0 is greedy decoding, None each agent's own ``sampling.temperature``.
    ``repeats``: trajectories for each query."""

    temperature: NonNegative | None = 0.0
    repeats: Count = 1

    @model_validator(mode="after")
    def _repeats_differ(self) -> "EvaluationSampling":
        if self.repeats > 1 and self.temperature == 0:
            raise ValueError(
                f"repeats={self.repeats} with temperature=0: greedy decoding repeats the same answer; set a temperature"
            )
        return self
