"""The user's settings of the training schedule: steps, batches, evaluations, checkpoints."""

import re
from typing import Annotated, Final

from pydantic import Field, field_validator, model_validator

from ..config_base import Config, Count, Natural, Positive, Seconds, Share, Unit
from ..messages import EvaluationSampling
from ..names import PolicyName
from .plan import Barrier

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")


class TrainingConfig(Config):
    """A step draws queries and runs the workflow several times on each (a group; one trajectory is enough for ppo and
    reinforce_pp, which compare nothing within it)."""

    steps: Annotated[Natural, Unit("steps")]
    """Steps of the run. A policy has a new version after each. 0: supervised batches and the evaluation alone."""
    queries_per_step: Annotated[Count, Unit("queries")] = 16
    """Queries of a step (prompts per step)."""
    trajectories_per_query: Annotated[Count, Unit("trajectories")] = 8
    """Trajectories of a query (the group size)."""
    micro_batch: Annotated[Count, Unit("samples")] = 32
    """Samples of one forward and backward pass."""
    largest_micro_batch: Annotated[Count, Unit("samples")] | None = None
    """Most samples that are computed together. Those that wait while their policy computes, or has no slots, are joined
    up to this number, so that the ranks share more of them, more evenly. `null`: `micro_batch`, nothing is joined."""
    barrier: Barrier = "policy"
    """Barrier before the next step in `strict`. `policy`: each of its turns waits for the new version of its own policy
    alone. `step`: no turn begins before all policies have their new versions (FlexMARL, arXiv 2602.09578); for
    comparison."""
    updates: Annotated[Count, Unit("updates")] = 1
    """Optimizer steps of a step, each on other queries: see [Several updates a
    step](algorithms.md#several-updates-a-step)."""
    compute_timeout_s: Seconds = 3600.0
    """Deadline of one computation of the trainer: a micro-batch, an optimizer step, ten supervised batches, the saving
    of a policy. The run ends if it is over."""
    data_timeout_s: Seconds = 600.0
    """Deadline of one draw from the recipe's `train_query` or query source (all queries of a step), and of
    `eval_queries`. The run ends if it is over."""


class EvaluationConfig(EvaluationSampling):
    """Evaluations on the recipe's evaluation queries, before the first step, after the last and between.

    With several trajectories for each query, pass@k (Chen et al. 2021, arXiv 2107.03374) is the share of queries that
    one of k trajectories solves."""

    every: Annotated[Natural, Unit("steps")] = 0
    """Steps between evaluations. 0 leaves only those before the first step and after the last."""
    held_out: bool = False
    """`true` declares that no evaluation query is among the training queries: the result of a run then says so."""
    success: str = "accuracy"
    """Metric of the workflow, or `reward/<agent>`, that decides pass@k: a trajectory has solved its query if the metric
    is at least 1."""
    samplings: dict[str, EvaluationSampling] = Field(default_factory=dict)
    """Further samplings of the same evaluation, by name."""

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
    """Past versions of a trained policy, of which one plays each step."""

    policy: PolicyName
    """Name of the policy whose past versions play."""
    exploiters: list[PolicyName] = Field(default_factory=list)
    """Further trained policies whose versions join the pool, at the same steps: see [A
    league](opponents.md#a-league)."""
    against: PolicyName | None = None
    """Name of the trained policy that plays against the pool, whose results count. None: `policy`, or `pool_of`."""
    every: Annotated[Count, Unit("steps")] = 10
    """Steps between two members. The initial weights are the first member."""
    size: Annotated[Count, Unit("members")] = 16
    """Number of members that stay, the newest ones."""
    rule: str = "uniform"
    """Rule of the draw for each step: `uniform`, `latest`, `pfsp` (prioritised fictitious self-play), `nash` (a Nash
    mixture of the pay-off matrix), or the name of a function in `workflow.py` that gives a weight for each member."""
    power: Positive = 2.0
    """Exponent of `pfsp`: members are drawn with weights `(1 - win rate) ** power`."""
    explore: Share = 0.25
    """Share of the steps under `nash` that measure the pay-off matrix: the member plays that the newest version has met
    in the fewest games."""
    matches: Annotated[Natural, Unit("games")] = 0
    """Games on each query of an evaluation that a new version plays against each member, for the pay-off matrix. 0: the
    matrix counts the games of training."""
    only: Annotated[Natural, Unit("step")] | None = None
    """Step of one version that plays instead: from then on the policy as it is after this step, until then the initial
    one. The other keys are not for it."""

    @model_validator(mode="after")
    def _only_one(self) -> "PoolOfConfig":
        for key in ("every", "size", "rule", "power", "explore", "matches", "exploiters"):
            field = type(self).model_fields[key]
            if self.only is not None and getattr(self, key) != field.get_default(call_default_factory=True):
                raise ValueError(f"only={self.only} has one member, and no draw: leave out {key}")
        return self

    @model_validator(mode="after")
    def _league_has_members(self) -> "PoolOfConfig":
        needed = 1 + len(self.exploiters)
        if self.size < max(needed, 2) and (self.rule == "nash" or self.exploiters):
            raise ValueError(
                f"size={self.size}: a league without members: rule={self.rule} with {len(self.exploiters)} exploiters "
                f"needs at least {max(needed, 2)}"
            )
        if len(set(self.exploiters) | {self.policy}) < needed:
            raise ValueError(
                f"exploiters={self.exploiters}: name each policy once, and not {self.policy!r} itself"
            )
        return self

    @property
    def sources(self) -> tuple[PolicyName, ...]:
        """The policies whose versions are members."""
        return (self.policy, *self.exploiters)

    @property
    def trainee(self) -> PolicyName:
        """The policy in training that plays against the pool."""
        return self.policy if self.against is None else self.against

    def joins_after(self, step: int) -> bool:
        """True if the policy as it is after ``step`` is a member."""
        return step in (0, self.only) if self.only is not None else step % self.every == 0


class CheckpointConfig(Config):
    """The checkpoints of a run."""

    every: Annotated[Natural, Unit("steps")] = 50
    """Steps between checkpoints. 0 leaves only the last."""
    keep: Annotated[Count, Unit("checkpoints")] = 2
    """Number of checkpoints that are kept, the newest ones."""
