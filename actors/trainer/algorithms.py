"""The algorithms by name: the parts of each, and the numbers of its paper. Data only, no torch.

An algorithm is a choice in each of these columns; ``objective.py`` puts the chosen functions together.

credit assignment, an agent's
    baseline, scale_rewards   subtracted from a sample's reward; its divisor      ``advantage.py``
    grouping                  the rewards that a reward is compared with          ``rollout/groups/comparison.py``
    rewards                   the trajectory's, the turn's own, or their sum      ``rollout/trajectory_rewards.py``
loss, a policy's
    surrogate                 the objective of each token                         ``loss.py``
    aggregation               the divisor of the sum over tokens at the step      ``loss.py``
    KL                        its estimator, and a place in the loss or reward    ``kl.py``
both: the policy and all of its agents must agree (``trainer_config.credit_problem``)
    critic (a baseline)       trained with the policy, on the samples of all of its agents
    whiten                    normalises over the policy's step, over the samples of all of its agents
    a KL in the rewards       computed with the policy's reference, subtracted from an agent's rewards
"""

from dataclasses import dataclass
from typing import Literal

from ..messages import Grouping, RewardUse

AlgorithmName = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "at_grpo",
    "dr_mas",
    "ppo",
    "rae",
]
Baseline = Literal["group_mean", "leave_one_out", "role_mean", "critic", "none"]
Surrogate = Literal["clipped", "clipped_sequence", "clipped_weight", "reinforce"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
Correction = Literal["none", "truncate", "mask", "decoupled"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row of the table.

    ``scale_rewards``: the centred reward is divided by the group's standard deviation; None if the algorithm has no
    such division. ``whiten``: the advantages are normalised over all tokens of the step, so that the algorithm does not
    stream. ``rewards``: used unless the config chooses; None: the trajectory's, and a turn's own is refused, because it
    needs another comparison than the paper's. ``kl_estimator``, ``kl_in_reward``: of the KL to a reference policy, if
    there is one (``kl_coefficient``).
    """

    paper: str
    baseline: Baseline = "group_mean"
    surrogate: Surrogate = "clipped"
    aggregation: Aggregation = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    scale_rewards: bool | None = True
    whiten: bool = False
    grouping: Grouping = "trajectory"
    rewards: RewardUse | None = None
    kl_estimator: KlEstimator = "k3"
    kl_in_reward: bool = False


ALGORITHMS: dict[AlgorithmName, Algorithm] = {
    # The paper's KL (eq. 4, coefficient 0.04) is ``kl_coefficient``, 0 unless given: it needs a second model.
    "grpo": Algorithm("Shao et al., arXiv 2402.03300, eq. 3 and section 4.1.2", aggregation="sequence_mean"),
    "dr_grpo": Algorithm(
        "Liu et al., arXiv 2503.20783, section 3.2", aggregation="constant", scale_rewards=False
    ),
    # Its other parts are settings of their own: ``rollout.drop_zero_advantage`` (eq. 11), ``sampling.overlong_buffer``
    # (eq. 13).
    "dapo": Algorithm("Yu et al., arXiv 2503.14476, eq. 8 and 9", clip_high=0.28),
    "gspo": Algorithm(
        "Zheng et al., arXiv 2507.18071, eq. 5 to 7; clip range of section 5.1",
        surrogate="clipped_sequence",
        aggregation="sequence_mean",
        clip_low=3e-4,
        clip_high=4e-4,
    ),
    # The paper gives no upper bound; a weight of at most 5 is that of ScaleRL (Khatri et al., arXiv 2510.13786).
    "cispo": Algorithm(
        "MiniMax, arXiv 2506.13585, eq. 4 and 5", surrogate="clipped_weight", clip_low=1.0, clip_high=4.0
    ),
    "rloo": Algorithm(
        "Ahmadian et al., arXiv 2402.14740, eq. 5 to 8",
        baseline="leave_one_out",
        surrogate="reinforce",
        aggregation="sequence_sum",
        clip_low=0.0,
        clip_high=0.0,
        scale_rewards=None,
        kl_estimator="k1",
        kl_in_reward=True,
    ),
    "reinforce_pp": Algorithm(
        "Hu et al., arXiv 2501.03262, section 3.1: one trajectory per query is enough",
        baseline="none",
        scale_rewards=None,
        whiten=True,
        rewards="both",
        kl_estimator="k1",
        kl_in_reward=True,
    ),
    "reinforce_pp_baseline": Algorithm(
        "Hu et al., arXiv 2501.03262, section 3.2", scale_rewards=None, whiten=True, kl_estimator="k2"
    ),
    # The paper's groups and its mixture of rewards, alpha times the team's (``team_weight``, 1 in the paper) and the
    # turn's own. Its tree sampling (several answers to one and the same prompt in every turn, the best of which the
    # trajectory continues with) is not here.
    "at_grpo": Algorithm(
        "Zhao et al., arXiv 2510.11062, section 4.1 and 4.2, without the tree sampling",
        grouping="turn",
        rewards="both",
    ),
    "dr_mas": Algorithm("Feng et al., arXiv 2602.08847, eq. 5", grouping="agent_turns", rewards="both"),
    # Not whitened: an advantage depends on its own sample and the critic alone, so that PPO streams.
    "ppo": Algorithm(
        "Schulman et al., arXiv 1707.06347, eq. 7; of language models Ouyang et al., arXiv 2203.02155, section 3.5",
        baseline="critic",
        scale_rewards=None,
        rewards="both",
        kl_estimator="k1",
        kl_in_reward=True,
    ),
    # The running mean of a role's rewards in place of a group: one trajectory per query is enough.
    "rae": Algorithm(
        "Liu et al. (SPIRAL), arXiv 2506.24119, section 3.3",
        baseline="role_mean",
        surrogate="reinforce",
        aggregation="sequence_sum",
        clip_low=0.0,
        clip_high=0.0,
        scale_rewards=None,
    ),
}
"""Every algorithm that can be configured."""

CORRECTION_BOUNDS: dict[Correction, tuple[float | None, float | None]] = {
    "none": (None, None),
    "truncate": (None, 2.0),
    "mask": (0.5, 5.0),
    "decoupled": (None, 5.0),
}
"""Default bounds of the weight, low and high; ``importance_weights.correction_weights`` has the sources."""

DEFAULT_CORRECTION: Correction = "truncate"


def whole_batch_reason(algorithm: Algorithm, kl_in_reward: bool) -> str | None:
    """The reason why no gradient can be computed before the step's last sample is there; None if it can.

    ``kl_in_reward``: there is a KL, and it is in the rewards.
    """
    if algorithm.whiten:
        return "it normalises the advantages over all samples of a step"
    if kl_in_reward and algorithm.baseline == "leave_one_out":
        return "the KL in its rewards is compared within the group"
    return None


def sync_warning(policy: str, name: AlgorithmName, reason: str) -> str:
    """A warning for the user about a policy that can't stream."""
    return (
        f"policy {policy}: {name} can't train on a micro-batch before the step's rollout has ended, because {reason}. "
        "The policy runs as in mode sync; the other policies are not affected"
    )
