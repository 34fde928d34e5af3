"""The algorithms by name: the parts of each, and the numbers of its paper. Data only, no torch.

An algorithm is a choice in each of these columns. The files of the last column are in ``rollout/`` and in
``trainer/objective/``, where ``objective.py`` puts the chosen functions together.

credit assignment, an agent's
    estimator, scale_rewards  advantages from a group's rewards; their divisor    a file of this folder
    grouping                  the rewards that a reward is compared with          ``groups/credit_assignment.py``
    rewards                   the trajectory's, the turn's own, or their sum      ``trajectory_rewards.py``
    role_baseline             less the running mean of the agent's rewards        ``role_baselines.py``
loss, a policy's
    surrogate, has_ratio      the objective of each token                         a file of ``objective/losses/``
    aggregation               the divisor of the sum over tokens at the step      ``loss.py``
    KL                        its estimator, and a place in the loss or reward    ``kl.py``
both: the policy and all of its agents must agree (``trainer_config.credit_problem``)
    critic                    trained with the policy, on the samples of all of its agents
    whiten                    normalises over the policy's step, over the samples of all of its agents
    a KL in the rewards       computed with the policy's reference, subtracted from an agent's rewards
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from ..messages import Grouping, RewardUse
from .estimator import Estimator
from .group_mean import GroupMean
from .hierarchical import Hierarchical
from .leave_one_out import LeaveOneOut
from .raw_reward import RawReward
from .win_rate import WinRate

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
KlRewards = Literal["token", "trajectory"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row of the table.

    ``surrogate``: the file of ``objective/losses/`` with the loss of a token. ``has_ratio``: it compares the policy
    with an older one. ``needs_advantage``: a sample whose advantage is 0 teaches nothing. ``options``: the numbers of
    the surrogate's own, by name, if it has some in place of ``clip_low`` and ``clip_high``; they are greater than 0,
    but for ``signed_options``.

    ``scale_rewards``: the advantages of a group are divided by its standard deviation; None if the algorithm has no
    such division. ``role_baseline``, ``whiten``, ``critic``: what the trainer does to advantages after that
    (``objective/transforms.py``). ``kl_rewards``: the rewards that a KL may be subtracted from, of each token or of a
    whole trajectory; None: the KL has no place in the rewards. ``rewards``: used unless the config chooses; None: the
    trajectory's, and a turn's own is refused, because it needs another comparison than the paper's. ``kl_estimator``,
    ``kl_in_reward``: of the KL to a reference policy, if there is one (``kl_coefficient``).
    """

    paper: str
    estimator: type[Estimator] = GroupMean
    surrogate: str = "clipped"
    has_ratio: bool = True
    needs_advantage: bool = True
    options: tuple[tuple[str, float], ...] = ()
    signed_options: tuple[str, ...] = ()
    aggregation: Aggregation = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    scale_rewards: bool | None = True
    role_baseline: bool = False
    whiten: bool = False
    critic: bool = False
    grouping: Grouping = "trajectory"
    rewards: RewardUse | None = None
    kl_estimator: KlEstimator = "k3"
    kl_in_reward: bool = False
    kl_rewards: KlRewards | None = None


ALGORITHMS: dict[str, Algorithm] = {
    # The paper's KL (eq. 4, coefficient 0.04) is ``kl_coefficient``, 0 unless given: it needs a second model.
    "grpo": Algorithm("Shao et al., arXiv 2402.03300, eq. 3 and section 4.1.2", aggregation="sequence_mean"),
    "dr_grpo": Algorithm(
        "Liu et al., arXiv 2503.20783, section 3.2", aggregation="constant", scale_rewards=False
    ),
    # Its other parts are settings of their own: the filter ``equal_rewards`` of ``rollout.filters`` (eq. 11),
    # ``sampling.overlong_buffer`` (eq. 13).
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
        estimator=LeaveOneOut,
        surrogate="reinforce",
        has_ratio=False,
        aggregation="sequence_sum",
        clip_low=0.0,
        clip_high=0.0,
        scale_rewards=None,
        kl_estimator="k1",
        kl_in_reward=True,
        kl_rewards="trajectory",
    ),
    "reinforce_pp": Algorithm(
        "Hu et al., arXiv 2501.03262, section 3.1: one trajectory per query is enough",
        estimator=RawReward,
        scale_rewards=None,
        whiten=True,
        rewards="both",
        kl_estimator="k1",
        kl_in_reward=True,
        kl_rewards="token",
    ),
    "reinforce_pp_baseline": Algorithm(
        "Hu et al., arXiv 2501.03262, section 3.2",
        scale_rewards=None,
        whiten=True,
        kl_estimator="k2",
        kl_rewards="token",
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
        estimator=RawReward,
        critic=True,
        scale_rewards=None,
        rewards="both",
        kl_estimator="k1",
        kl_in_reward=True,
        kl_rewards="token",
    ),
    # The running mean of a role's rewards in place of a group: one trajectory per query is enough.
    "rae": Algorithm(
        "Liu et al. (SPIRAL), arXiv 2506.24119, section 3.3",
        estimator=RawReward,
        role_baseline=True,
        surrogate="reinforce",
        has_ratio=False,
        aggregation="sequence_sum",
        clip_low=0.0,
        clip_high=0.0,
        scale_rewards=None,
    ),
    # The paper's clip alone: its majority votes, its advantage shaping by entropy and its trees are not here.
    "echo": Algorithm(
        "Zhao et al., arXiv 2602.02150, the clip of its policy update",
        surrogate="confidence_clip",
        clip_low=0.0,
        clip_high=0.0,
        options=(("least", 0.05), ("greatest", 0.2), ("kappa", 4.0), ("tail", 16.0)),
        signed_options=("kappa",),
    ),
    "sa_gcpo": Algorithm(
        "OxygenREC (2025), eq. 4 to 9; its gate is that of SAPO, Gao et al., arXiv 2511.20347",
        surrogate="soft_group_clip",
        aggregation="sequence_mean",
        clip_low=0.0,
        clip_high=0.0,
        options=(("tau_positive", 2.0), ("tau_negative", 5.0), ("target", 0.5)),
        signed_options=("target",),
    ),
    "habc": Algorithm(
        "Fang et al., arXiv 2606.17043; its weight after Peng et al., arXiv 1910.00177",
        estimator=Hierarchical,
        surrogate="advantage_weighted",
        has_ratio=False,
        needs_advantage=False,
        clip_low=0.0,
        clip_high=0.0,
        scale_rewards=False,
        options=(("temperature", 1.0), ("most", 5.0)),
    ),
    # The KL to a reference of eq. 8 is ``kl_coefficient``. Opponents are a pool's, by the games that rewards come from.
    "mnpo": Algorithm(
        "Wu et al., arXiv 2509.23102, eq. 8 and 13 to 16",
        estimator=WinRate,
        surrogate="nash_regression",
        aggregation="sequence_sum",
        clip_low=0.0,
        clip_high=0.0,
        scale_rewards=None,
        options=(("eta", 1.0),),
    ),
}
"""Every algorithm that can be configured."""


def _check_name(name: object) -> object:
    # Not a Literal of the names: that would be a second list, and would not know a row that is added later.
    if not isinstance(name, str) or name not in ALGORITHMS:
        *names, last = map(repr, ALGORITHMS)
        raise PydanticCustomError(
            "literal_error", "Input should be {expected}", {"expected": f"{', '.join(names)} or {last}"}
        )
    return name


AlgorithmName = Annotated[str, BeforeValidator(_check_name)]
"""A key of ``ALGORITHMS``."""
