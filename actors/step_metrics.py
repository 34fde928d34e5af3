"""Measurements of one training step: what the orchestrator reports to the console after every step.

Rewards and turns are an agent's, everything about weights is a policy's: two agents on one policy have two rewards and
one loss. ``launch/json_lines.py`` writes these objects to ``metrics.jsonl`` and reads them back.
"""

from dataclasses import dataclass, field

from .names import AgentName, PolicyName, Step, Version


@dataclass(frozen=True, slots=True)
class AgentMetrics:
    """One agent in one step."""

    reward: float | None = None
    """Mean over the trajectories in which the agent has a reward; None without such a trajectory."""
    zero_advantage_groups: int = 0
    """Groups whose samples of this agent were left out, because all its rewards are equal."""
    turns: int = 0
    """Turns of the trajectories that count, also of samples that were left out."""
    tokens: int = 0
    """Generated tokens of these turns."""
    truncated_turns: int = 0
    """Turns that ended at ``max_new_tokens``."""
    turn_tokens_p10: float | None = None
    """Quantiles of the generated tokens of a turn: a tenth of the turns has as many or fewer. None without a turn."""
    turn_tokens_p50: float | None = None
    turn_tokens_p90: float | None = None
    turn_tokens_max: float | None = None
    turn_reward: float | None = None
    """Mean of the rewards that single turns were given; None without any."""
    token_share: float | None = None
    """Share of the tokens that its policy was trained on in the step; None unless several agents share the policy."""
    advantage_share: float | None = None
    """Share of the sum of ``|advantage|`` over these tokens; None also if all are 0, and with a critic."""


@dataclass(frozen=True, slots=True)
class PolicyMetrics:
    """Figures of one policy in one step. Without an optimizer step, ``samples`` and the fields after it are None."""

    version: Version
    """The version after the step."""
    generated_by: Version
    """The version that the step's turns were meant for (``async``: the oldest such version)."""
    carried_samples: int = 0
    """Samples left to the next step, because the global batch was full."""
    stale_samples: int = 0
    """Trained samples that an older version had generated."""
    max_staleness: int = 0
    """Versions between the oldest trained sample and the policy."""
    backward_s: float = 0.0
    """Seconds of forward and backward."""
    samples: int | None = None
    """Samples of the optimizer step."""
    mean_tokens: float | None = None
    """Generated tokens per sample of the optimizer step."""
    nonzero_advantage_share: float | None = None
    """Share of the samples with an advantage other than zero."""
    loss: float | None = None
    """Mean over the step's tokens or sequences, as the algorithm says."""
    grad_norm: float | None = None
    """Before clipping."""
    lr: float | None = None
    clip_fraction: float | None = None
    """Share of the tokens whose ratio was clipped."""
    ratio_deviation: float | None = None
    """Train-inference mismatch: mean ``|ratio - 1|`` of a token's probabilities by trainer and engine."""
    entropy: float | None = None
    """Nats per token, estimated by the mean ``-log p`` of the tokens that have a gradient."""
    kl: float | None = None
    """Nats per token: KL from the reference, the mean of the estimate ``k3`` over the tokens; None without a
    reference."""
    advantage_mean: float | None = None
    """Over the tokens of all samples, as the next one: the standard deviation."""
    advantage_std: float | None = None
    unsure_tokens: int | None = None
    """Tokens drawn under a truncation that rounding may change; None without any."""
    padding_share: float | None = None
    """Share of the positions of all forwards that are padding."""
    skipped_updates: int | None = None
    """1 if the optimizer left the weights as they were, because the gradient was zero or not finite; otherwise 0."""
    optimizer_s: float | None = None
    """Seconds of the optimizer step."""
    publish_s: float | None = None
    """Seconds until all instances have applied the new weights."""
    pause_mean_s: float | None = None
    """Seconds from the last token of the turns that the new weights interrupted until an instance generates again; the
    mean of the instances. The next two kinds are parts of it."""
    pause_max_s: float | None = None
    """The longest of the instances, as the maxima below."""
    transfer_mean_s: float | None = None
    """Seconds of copying the bytes of the new weights to an instance."""
    transfer_max_s: float | None = None
    loads_by_shm: int | None = None
    """Instances that got the new weights through shared memory."""
    loads_by_cuda_ipc: int | None = None
    """Instances that read the new weights in the memory of the trainer's device."""
    load_mean_s: float | None = None
    """Seconds of an engine's own work with the new weights."""
    load_max_s: float | None = None
    value_loss: float | None = None
    """The critic's loss, if the policy has a critic."""
    explained_variance: float | None = None
    """The share of the returns' variance that the critic explains, if the policy has a critic."""
    pool_computing_s: float | None = None
    """Seconds of computing since the optimizer step before, as the other figures of a shared pool; None in a static."""
    pool_idle_s: float | None = None
    """Seconds on its slots without a computation."""
    pool_swapping_s: float | None = None
    """Seconds in which the policy was on its way to its slots or from them."""
    pool_waiting_s: float | None = None
    """Seconds in which a computation was ready, and other policies had the slots."""
    pool_suspended_s: float | None = None
    """Seconds without slots and without work."""
    suspensions: int | None = None
    """Number of times that the policy had to leave its slots."""
    swapped_mib: float | None = None
    """MiB of its state that moved between slots and the host's memory."""
    repeated_micro_batches: int | None = None
    """Micro-batches that were trained again, because a slot worker was lost; each time counts."""


@dataclass(frozen=True, slots=True)
class ProcessMetrics:
    """One actor process at the end of the step."""

    loop_lag_ms: float | None = None
    """The longest delay of the event loop since the last reading, milliseconds."""
    rss_mib: float | None = None
    """Resident memory, MiB."""
    cpu_s: float | None = None
    """CPU seconds since the process began."""
    mailbox_waiting: int = 0
    """Requests that have not begun, over all actors of the process."""
    mailbox_running: int = 0
    """Requests that are being served now."""
    mailbox_served: int = 0
    """Since the start, as the counts below."""
    mailbox_failed: int = 0
    mailbox_cancelled: int = 0
    open_calls: int = 0
    """Calls to other processes without a reply yet."""
    credit_waits: int = 0
    """Calls that wait for credit now."""
    sent_requests: int = 0
    """Since the start, as the counts below."""
    expired_calls: int = 0
    """Calls whose deadline passed."""
    lost_requests: int = 0
    """Requests whose message or reply was lost."""
    repeated_calls: int = 0
    """Calls that were sent again."""
    refused_messages: int = 0
    """Received messages that could not be decoded."""


@dataclass(frozen=True, slots=True)
class OpponentMetrics:
    """The games of one step against the member of a pool of past versions that played it, by the pool's policy."""

    opponent_step: Step | None = None
    """The member: the policy as it was after this step."""
    opponent_games: int | None = None
    """Trajectories in which both sides have a reward."""
    opponent_score: float | None = None
    """Mean score of the policy in training: 1 for a game that it has won, 0.5 for a draw, 0 for a loss."""
    opponent_payoff: float | None = None
    """Its mean reward."""
    opponent_elo: float | None = None
    """The member's rating after the step."""
    elo: float | None = None
    """The rating of the policy in training after the step."""


@dataclass(frozen=True, slots=True)
class DeviceMetrics:
    """One GPU of the machine in one step, of readings a second apart."""

    device_busy_percent: float | None = None
    """Share of the time in which the device computed, the mean; None if its driver does not report it."""
    device_used_mib: float | None = None
    """The most memory in use, MiB, by any process."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One step of the run; times are seconds. ``by_process``, ``by_actor`` and ``by_device`` are filled in by the
    console."""

    step: Step
    time_s: float
    """From the start of the (resumed) run to the end of the step."""
    step_s: float
    """From the end of the step before."""
    rollout_s: float
    """From the first turn to the end of the last trajectory."""
    tokens: int
    """Generated tokens of all agents."""
    tokens_per_s: float
    overlap_s: float | None = None
    """The part of ``rollout_s`` in which the step was trained too; None under ``async``."""
    stale_samples: int = 0
    """Sum over the policies."""
    max_staleness: int = 0
    """Maximum over the policies."""
    failed_trajectories: int = 0
    replaced_trajectories: int = 0
    """Trajectories that overran their deadline and were started again."""
    oversampled_trajectories: int = 0
    """Trajectories started beyond the size of a group, which the group did not wait for."""
    limited_trajectories: int = 0
    """Trajectories that asked for a turn beyond a limit of turns or tokens; those that failed by it too."""
    retried_turns: int = 0
    """Turns that were begun again, because their instance was lost; each time counts."""
    resumed_turns: int = 0
    """Turns that new weights interrupted and a later version completed."""
    resumed_tokens: int = 0
    """Tokens of the resumed turns that the earlier versions had generated."""
    dropped_groups: int = 0
    """Groups that gave no sample."""
    replaced_queries: int = 0
    """Queries drawn in place of dropped groups."""
    submitted_queries: int = 0
    """Queries that programs outside of the run have submitted, in place of drawn ones."""
    failed_submitted_trajectories: int = 0
    """Failed trajectories of submitted queries; not in ``failed_trajectories``."""
    restarted_groups: int = 0
    """Groups that were begun again, because their rollout worker was lost."""
    eval_s: float | None = None
    """Seconds of the evaluation after the step, if there was one; not in ``step_s``."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """Metrics of that evaluation by name, such as ``accuracy`` and ``reward/<agent>``."""
    workflow: dict[str, float] = field(default_factory=dict)
    """Means of the workflow's own metrics over the step's trajectories, by name."""
    by_agent: dict[AgentName, AgentMetrics] = field(default_factory=dict)
    by_policy: dict[PolicyName, PolicyMetrics] = field(default_factory=dict)
    by_opponent: dict[PolicyName, OpponentMetrics] = field(default_factory=dict)
    by_process: dict[str, ProcessMetrics] = field(default_factory=dict)
    by_device: dict[str, DeviceMetrics] = field(default_factory=dict)
    """By UUID."""
    by_actor: dict[str, dict[str, float]] = field(default_factory=dict)
    """Figures of the actors' own ``statistics()``, by actor and name: engine, transport, store."""
