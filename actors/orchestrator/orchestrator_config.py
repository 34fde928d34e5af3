"""The user's settings of the training schedule: steps, batches, evaluations, checkpoints."""

import re
from typing import Final

from pydantic import Field, field_validator, model_validator

from ..config_base import Config, Count, Natural, Positive, Seconds
from ..messages import EvaluationSampling
from ..names import PolicyName

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")


class TrainingConfig(Config):
    """A step draws ``queries_per_step`` queries and runs the workflow ``trajectories_per_query`` times on each
    (a group; one is enough for ppo and reinforce_pp, which compare nothing within it). ``micro_batch`` is the number of
    samples of one forward and backward.

    ``compute_timeout_s``: the deadline of one computation of the trainer: a micro-batch, an optimizer step, ten
    supervised batches, the saving of a policy. ``data_timeout_s``: the deadline of one draw from the
    recipe's query source, and of its ``eval_queries``."""

    steps: Count
    queries_per_step: Count = 16
    trajectories_per_query: Count = 8
    micro_batch: Count = 32
    compute_timeout_s: Seconds = 3600.0
    data_timeout_s: Seconds = 600.0


class EvaluationConfig(EvaluationSampling):
    """Evaluations on the recipe's evaluation queries: before the first step, after the last, and after every ``every``
    steps between (0: not between), by default with greedy decoding.

    ``repeats`` > 1 gives means over them and pass@k (Chen et al. 2021, arXiv 2107.03374): the share of queries that one
    of k trajectories solves. A trajectory has solved its query if the workflow's metric ``success`` is at least 1.
    ``samplings``: further ones of the same evaluation, by name; the name stands before their metrics. ``held_out``: the
    recipe declares that none of these queries is among the training queries.
    """

    every: Natural = 0
    held_out: bool = False
    success: str = "accuracy"
    samplings: dict[str, EvaluationSampling] = Field(default_factory=dict)

    @field_validator("samplings")
    @classmethod
    def _names_are_plain(cls, samplings: dict[str, EvaluationSampling]) -> dict[str, EvaluationSampling]:
        for name in samplings:
            if not _NAME.fullmatch(name) or name == "reward":
                raise ValueError(
                    f"sampling {name!r}: a name is up to 32 lower-case letters, digits and _, a letter first, and not "
                    "reward, which stands before the agents' rewards"
                )
        return samplings

    def all_samplings(self) -> dict[str, EvaluationSampling]:
        """All samplings; the name of the first is empty."""
        return {"": EvaluationSampling(temperature=self.temperature, repeats=self.repeats), **self.samplings}


class PoolOfConfig(Config):
    """Past versions of the trained policy ``policy``, of which one plays each step: the initial one, and one after
    every ``every`` steps, of which the newest ``size`` stay.

    ``rule``: of the draw: ``uniform``, ``latest``, ``pfsp`` (prioritised fictitious self-play with ``power``; see
    ``opponents/rules.py``), or the name of a function in the recipe's ``workflow.py`` that gives a weight for each
    member. ``only``: the policy as it is after this step plays from then on, and until then the initial one; the other
    keys are not for it.
    """

    policy: PolicyName
    every: Count = 10
    size: Count = 16
    rule: str = "uniform"
    power: Positive = 2.0
    only: Natural | None = None

    @model_validator(mode="after")
    def _only_one(self) -> "PoolOfConfig":
        for key in ("every", "size", "rule", "power"):
            if self.only is not None and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"only={self.only} has one member, and no draw: leave out {key}")
        return self

    def joins_after(self, step: int) -> bool:
        """True if the policy as it is after ``step`` is a member."""
        return step in (0, self.only) if self.only is not None else step % self.every == 0


class CheckpointConfig(Config):
    """A checkpoint after every ``every`` steps (0: only the last), of which the newest ``keep`` stay."""

    every: Natural = 50
    keep: Count = 2
