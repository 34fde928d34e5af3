"""The changes that a policy makes to the advantages which its samples bring from their groups.
``LossConfig.transforms`` is the list of one policy, in this order:

    RoleBaseline              less the running mean of the agent's rewards     when the sample comes
    TokenKl, TrajectoryKl     less a KL from the reference policy              when the step is complete
    Whiten                    normalised over the tokens of the step           when the step is complete
    Critic                    replaced by those of the critic's values         in the forward, with ``TokenKl`` in it

A transform ``streams`` if it needs nothing but the sample itself. A policy waits for its whole batch if one of its
transforms does not stream: nothing else decides that.

No torch is imported until there are tensors: the launcher reads the list, and has none.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from ...credit.algorithms import KlRewards
from ...messages import Grouping, Sample
from ...names import AgentName
from ...sample_id import SampleId

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class WholeStep:
    """All samples of a step, ``R`` of them with ``N`` completion tokens. ``grouping``: by agent. ``lengths`` ``[R]``
    int64. ``penalties`` ``[N]`` float64: the KL of each token times its coefficient, or 0."""

    samples: Sequence[Sample]
    grouping: Mapping[AgentName, Grouping]
    lengths: "Tensor"
    penalties: "Tensor"

    def episode(self, sample: Sample) -> Hashable:
        """Names the part of a group that has one reward: the agent's turns of a trajectory, or a single turn."""
        if self.grouping[AgentName(sample.agent)] == "trajectory":
            return sample.agent, sample.group, SampleId.parse(sample.sample_id).trajectory
        return sample.sample_id


@dataclass(frozen=True)
class Transform:
    """Changes advantages at one moment, and leaves them as they are at the others.

    ``streams``: needs the sample alone; ``reason``: for users, if it does not. ``compares``: all samples of a group
    must be in the same optimizer step.
    """

    streams: ClassVar[bool] = True
    reason: ClassVar[str] = ""
    compares: ClassVar[bool] = False

    def of_sample(self, advantage: float, role_mean: float) -> float:
        """Changes it when its sample comes. ``role_mean``: of the agent when the step began, 0 if it has none."""
        return advantage

    def of_step(self, advantages: "Tensor", step: WholeStep) -> "Tensor":
        """Changes them when the step is complete: ``[N]`` float64 in and out. Not called if all of the policy's
        transforms stream."""
        return advantages


class RoleBaseline(Transform):
    """RAE's baseline (SPIRAL, Liu et al., arXiv 2506.24119, section 3.3); ``RoleBaselines`` has the means.

    It is not subtracted where the group closes: the means move with the optimizer's steps, and only the trainer knows
    them to the last bit on any number of rollout workers.
    """

    def of_sample(self, advantage: float, role_mean: float) -> float:
        return advantage - role_mean


class TokenKl(Transform):
    """The KL of a token and of those behind it (REINFORCE++, Hu et al., arXiv 2501.03262, section 3.1). With a critic
    it is in the rewards of the tokens instead, of which the critic's advantages are made."""

    def of_step(self, advantages: "Tensor", step: WholeStep) -> "Tensor":
        from .advantage import rewards_to_go

        return rewards_to_go(advantages, -step.penalties, step.lengths)


class TrajectoryKl(Transform):
    """The KL over an agent's turns of a trajectory, less that of the group's other trajectories (RLOO, Ahmadian et al.,
    arXiv 2402.14740, eq. 1 and 8): the leave-one-out baseline is linear, so that the rewards' share of it is there when
    the group closes, and the KL's can follow. If turns have rewards of their own, a turn's is compared with that of the
    agent's other turns."""

    streams: ClassVar[bool] = False
    reason: ClassVar[str] = "the KL in its rewards is compared within the group"
    compares: ClassVar[bool] = True

    def of_step(self, advantages: "Tensor", step: WholeStep) -> "Tensor":
        from .advantage import leave_one_out_penalties, number_keys
        from .loss import sequence_sums

        penalties = leave_one_out_penalties(
            sequence_sums(step.penalties, step.lengths),
            number_keys([step.episode(sample) for sample in step.samples]),
            number_keys([(sample.agent, sample.group) for sample in step.samples]),
            step.lengths.new_tensor([sample.group_size for sample in step.samples]),
        )
        return advantages - penalties.repeat_interleave(step.lengths)


KL_TRANSFORMS: Final[Mapping[KlRewards, type[Transform]]] = {"token": TokenKl, "trajectory": TrajectoryKl}
"""By the rewards that an algorithm's KL is subtracted from."""


class Whiten(Transform):
    """The normalisation over all tokens of the policy's step (REINFORCE++, Hu et al., arXiv 2501.03262, section 3.1),
    of all of its agents, as the divisor of the gradient is."""

    streams: ClassVar[bool] = False
    reason: ClassVar[str] = "it normalises the advantages over all samples of a step"

    def of_step(self, advantages: "Tensor", step: WholeStep) -> "Tensor":
        from .advantage import whiten

        return whiten(advantages)


@dataclass(frozen=True)
class Critic(Transform):
    """Generalised advantage estimation with discount ``gamma`` and trace ``lam`` (Schulman et al., arXiv 1506.02438).

    It streams: the critic steps when the policy does, so that within a step the values of a sample need that sample
    alone. They are not normalised over the step.
    """

    gamma: float
    lam: float

    def of_forward(
        self, rewards: "Tensor", penalties: "Tensor", values: "Tensor", lengths: "Tensor", longest: int
    ) -> tuple["Tensor", "Tensor"]:
        """The advantages and the critic's returns, ``[N]`` each. ``rewards`` and ``lengths`` ``[R]``, ``longest`` the
        greatest of them; ``penalties`` and ``values`` ``[N]``, the critic's at the step's begin."""
        from .critic import generalized_advantages, token_rewards

        # Detached: the critic learns from its own loss alone, never from the policy's.
        token = token_rewards(rewards, penalties, lengths)
        return generalized_advantages(
            token, values.detach(), lengths, longest, gamma=self.gamma, lam=self.lam
        )


def whole_batch_reason(transforms: Iterable[Transform]) -> str | None:
    """The reason why no gradient can be computed before the step's last sample is there; None if it can."""
    return next((transform.reason for transform in transforms if not transform.streams), None)


def advantage_of_sample(transforms: Sequence[Transform], advantage: float, role_mean: float) -> float:
    """The advantage of a sample that has come, before the transforms of its step and its forward."""
    # Each transform has its moment, and leaves advantages alone at the others: so one list can be run at each of them.
    for transform in transforms:
        advantage = transform.of_sample(advantage, role_mean)
    return advantage


def sync_warning(policy: str, algorithm: str, reason: str) -> str:
    """A warning for the user about a policy that can't stream."""
    return (
        f"policy {policy}: {algorithm} can't train on a micro-batch before the step's rollout has ended, because "
        f"{reason}. The policy runs as in mode sync; the other policies are not affected"
    )
