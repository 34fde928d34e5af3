"""The figures of a run: a table with one row for each. A new figure is a row here and the line that measures it.

A measured number goes into a dictionary by the row's name. The dictionary travels unchanged in messages. Several
measurements of one step are merged by the row's rule. The figure is written to ``metrics.jsonl`` and to sinks as
``name`` or ``name/<subject>``, the report draws the row's chart, and ``launch/docs/metrics.md`` has its unit and
meaning.

The metrics of a workflow, an evaluation and a query source have no rows: their names are the user's. They are written
with the name of their family (``FAMILIES``) and a slash before them, so that none has the key of a figure of the run.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

Subject = Literal["step", "agent", "policy", "opponent", "process", "device"]
"""The thing that a figure is about. Its name is behind the slash of a key; a figure of the step has none."""

Merge = Literal["sum", "max", "mean", "only"]
"""The rule that makes one figure of the measurements of a step. ``only``: there is one; a later one replaces it."""

Numbers: TypeAlias = dict[str, int | float]
"""Figures of one subject by name. Counts are ints, also after a message."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A small chart of the report, with a curve for each agent or policy. ``share_of``: the figure that the value is
    divided by. ``complement``: 1 - value is drawn. ``percent``: the format of the axis."""

    title: str
    y_label: str = ""
    percent: bool = False
    share_of: str = ""
    complement: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """``unit`` and ``meaning`` are those of the metrics page.

    ``merge``: over the micro-batches, ranks, groups and instances of a step. ``per``: the count of the optimizer step
    that the sum is divided by: ``samples``, ``tokens``, ``trained_tokens`` (of samples with a gradient),
    ``compared_tokens`` (of these, with a known probability at the step's begin), ``positions`` (of the forwards'
    inputs), ``sample_tokens`` (of samples with a gradient, prompts included) or ``divisor`` (of the loss). ``empty``:
    the figure of a step without a measurement; None: it is left out. ``hides_zero``: it is left out too if it is 0.
    """

    name: str
    unit: str
    meaning: str
    merge: Merge = "only"
    per: str = ""
    empty: int | float | None = None
    hides_zero: bool = False
    chart: Chart | None = None


def _counts(*rows: tuple[str, str, str]) -> tuple[Figure, ...]:
    """Figures that are added up from 0."""
    return tuple(Figure(*row, merge="sum", empty=0) for row in rows)


_STEP: Final = (
    Figure("step", "steps", "the step"),
    Figure("time_s", "s", "time since the run started"),
    Figure("step_s", "s", "time since the step before was complete"),
    Figure("rollout_s", "s", "from the first turn of the step to the end of its last trajectory"),
    Figure("overlap_s", "s", "time in which training of the step ran during rollouts of the same step"),
    Figure("tail_s", "s",
           "the end of `rollout_s` in which each group that was open waited for one trajectory alone; groups of one "
           "trajectory have none"),
    Figure("swap_s", "s",
           "after `rollout_s`: states of policies moved to the slots of a shared pool or from them, and no policy "
           "computed; left out if it is 0, and in `async`", hides_zero=True),
    Figure("weights_s", "s",
           "after `rollout_s`: new weights were on their way, no policy computed, and no state moved; left out if it "
           "is 0, and in `async`", hides_zero=True),
    Figure("environment_s", "s",
           "seconds before and between the turns of the trajectories that count, in which none was under way: of the "
           "workflow, its environment, its tools; the sum", "sum", empty=0.0),
    Figure("reward_s", "s",
           "seconds from their last turns until their rewards were there, the sum", "sum", empty=0.0),
    Figure("tokens", "tokens", "generated tokens of all agents"),
    Figure("tokens_per_s", "tokens/s", "generated tokens by second of the step"),
    Figure("stale_samples", "count", "trained samples that an older version generated, the sum over the policies",
           "sum", empty=0),
    Figure("max_staleness", "versions", "the greatest age of a trained sample, the maximum over the policies",
           "max", empty=0),
    *_counts(
        ("failed_trajectories", "count", "trajectories that raised or overran"),
        ("replaced_trajectories", "count", "trajectories that overran and were started again"),
        ("oversampled_trajectories", "count", "trajectories that a group did not need"),
        ("late_trajectories", "count",
         "trajectories whose [rewards](experience-store.md#late-rewards) from outside came too late, or not at all; "
         "not in `failed_trajectories`"),
        ("limited_trajectories", "count",
         "trajectories that asked for a turn beyond a [limit](environments.md#limits) of turns or tokens; those that "
         "failed by it too"),
        ("retried_turns", "count", "turns that were begun again, because their instance was lost; each time counts"),
        ("resumed_turns", "count", "turns that new weights interrupted and a later version ended (partial rollouts)"),
        ("resumed_tokens", "tokens", "tokens of the resumed turns that the earlier versions had generated"),
        ("dropped_groups", "count", "groups without samples"),
        ("replaced_queries", "count", "queries drawn in the place of dropped groups"),
        ("carried_queries", "count", "queries that the step left open, and the next one continues"),
        ("submitted_queries", "count",
         "queries that programs outside of the run have submitted, or that come again, in place of drawn ones"),
        ("logged_trajectories", "count",
         "trajectories of logs that programs have submitted, or that come again; no other figure but those of training "
         "counts them"),
        ("replayed_groups", "count", "groups that come again, by [replay](modes.md#replay)"),
        ("failed_submitted_trajectories", "count",
         "failed trajectories of submitted queries; not in `failed_trajectories`"),
        ("restarted_groups", "count", "groups that were begun again, because their rollout worker was lost"),
    ),
    Figure("gateway_merged", "count",
           "turns of programs that continue the tokens of an earlier one; left out if it is 0, as are the next five",
           "sum", hides_zero=True),
    Figure("gateway_branched", "count",
           "turns of programs that begin again in a conversation: [branches](programs.md#the-turns-that-are-trained)",
           "sum", hides_zero=True),
    Figure("gateway_masked", "count",
           "turns that are not trained, by `open_gateway(train=...)` or `Rewards.leave_out`", "sum", hides_zero=True),
    Figure("expired_sessions", "count",
           "[sessions](programs.md#from-a-service) that got no rewards before they expired", "sum", hides_zero=True),
    Figure("closed_sessions", "count", "sessions that were closed without rewards", "sum", hides_zero=True),
    Figure("lost_sessions", "count", "sessions whose rollout worker was lost", "sum", hides_zero=True),
    Figure("shared_groups", "count",
           "groups of [other runs](modes.md#sharing-between-runs); left out if it is 0", "sum", hides_zero=True),
    Figure("reward_calls", "count",
           "calls of [reward functions](environments.md#rewards-that-compute), also of trajectories that failed; left "
           "out if it is 0, as are the next four", "sum", hides_zero=True),
    Figure("reward_queue_s", "s", "seconds that these calls waited for a process, the sum", "sum", hides_zero=True),
    Figure("reward_compute_s", "s", "seconds that they were in one, the sum", "sum", hides_zero=True),
    Figure("repeated_rewards", "count",
           "times that such a call was begun again, because its process or its service was lost", "sum",
           hides_zero=True),
    Figure("overrun_rewards", "count", "such calls that passed a deadline", "sum", hides_zero=True),
    Figure("branch_points", "count",
           "prompts that several turns answered in [trees](environments.md#trees); left out if it is 0, as are the "
           "next two", "sum", hides_zero=True),
    Figure("cut_lines", "count", "lines of trees that were cut at such a point", "sum", hides_zero=True),
    Figure("untrained_branch_turns", "count", "turns of trees that only cut lines hold, and that are not trained",
           "sum", hides_zero=True),
    Figure("explorations", "count",
           "trajectories that only [chose](algorithms.md#explorations) those that were played again; left out if it is "
           "0, as are the next three", "sum", hides_zero=True),
    Figure("explored_tokens", "tokens", "their tokens, which `tokens` does not count", "sum", hides_zero=True),
    Figure("failed_explorations", "count", "those that raised or overran; not in `failed_trajectories`", "sum",
           hides_zero=True),
    Figure("unlike_explorations", "count",
           "trajectories that were played again, and had another reward than their explorations", "sum",
           hides_zero=True),
    Figure("demonstrated_trajectories", "count",
           "trajectories that followed a [demonstration](environments.md#demonstrations); left out if it is 0, as are "
           "the next two", "sum", hides_zero=True),
    Figure("patched_turns", "count", "turns of these in whose place the environment took the recorded action", "sum",
           hides_zero=True),
    Figure("departed_trajectories", "count", "those that ended at a turn which departed from their demonstration",
           "sum", hides_zero=True),
    Figure("eval_s", "s", "time of the evaluation after the step; not in `step_s`"),
)  # fmt: skip

_AGENT: Final = (
    Figure("reward", "reward", "mean over the trajectories in which the agent has a reward", "mean"),
    Figure("filtered_samples", "count", "samples that [filters](modes.md#group-filters) left out",
           "sum", empty=0, chart=Chart("Filtered samples", "samples")),
    Figure("turns", "count", "turns of the trajectories that count", "sum", empty=0),
    Figure("tokens", "tokens", "generated tokens of these turns", "sum", empty=0),
    Figure("truncated_turns", "count", "turns that ended at `max_new_tokens`", "sum", empty=0,
           chart=Chart("Truncated turns", "share of the turns", percent=True, share_of="turns")),
    Figure("queue_s", "s", "seconds that these turns waited for room at an instance, the sum", "sum"),
    Figure("service_s", "s", "seconds that they were at an instance, the sum", "sum"),
    Figure("turn_tokens_p10", "tokens", "a tenth of the turns has as many generated tokens or fewer"),
    Figure("turn_tokens_p50", "tokens", "the same of half of the turns"),
    Figure("turn_tokens_p90", "tokens", "the same of nine tenths of the turns"),
    Figure("turn_tokens_max", "tokens", "generated tokens of the longest turn"),
    Figure("turn_reward", "reward", "mean of the rewards that single turns were given", "mean",
           chart=Chart("Turn reward")),
    Figure("token_share", "share",
           "of a policy that several agents share: the agent's part of the step's trained tokens",
           chart=Chart("Token share")),
    Figure("advantage_share", "share",
           "of such a policy: the agent's part of the sum of <code>&#124;advantage&#124;</code> over these tokens",
           chart=Chart("Advantage share")),
    Figure("gradient_share", "share",
           "of such a policy: the norm of the gradient of the agent's samples, over the sum of the agents' norms; in "
           "the steps of `trainer.role_gradients_every`, of the first update", chart=Chart("Gradient share")),
)  # fmt: skip

_POLICY: Final = (
    Figure("carried_samples", "count", "samples that are left for the next step (`global_batch`)", empty=0),
    Figure("samples", "count", "trained samples"),
    Figure("mean_tokens", "tokens", "generated tokens per trained sample"),
    Figure("loss", "–", "mean over the step's tokens or sequences, as the algorithm says", "sum", per="divisor",
           empty=0.0, chart=Chart("Loss", "loss")),
    Figure("grad_norm", "–", "norm of the gradient before clipping", chart=Chart("Gradient norm", "before clipping")),
    Figure("entropy", "nats per token",
           "of the distribution that tokens are drawn from, the mean over the tokens that are trained: exact with an "
           "`entropy_coefficient`, else estimated by their `-log p`", "sum", per="trained_tokens",
           chart=Chart("Entropy", "nats per token")),
    Figure("kl", "nats per token",
           "KL from the reference, the mean of the estimate `k3` over the tokens; of algorithms with a "
           "`kl_coefficient`",
           "sum", per="tokens", chart=Chart("KL from the reference", "nats per token")),
    Figure("clip_fraction", "share", "tokens that the clip holds back", "sum", per="trained_tokens", empty=0.0,
           chart=Chart("Clipped", "share of the tokens", percent=True)),
    Figure("ratio_deviation", "–",
           "mean difference between the trainer's and the engine's probability of a token: about 1e-6 if both agree",
           "sum", per="compared_tokens", empty=0.0, chart=Chart("Ratio deviation", "mean |ratio - 1|")),
    Figure("old_ratio_deviation", "–",
           "mean difference from 1 of the ratio that the algorithm clips, of the policy to the "
           "[old policy](algorithms.md#the-old-policy); left out if it is 0, as in a step of one update",
           "sum", per="trained_tokens", hides_zero=True, chart=Chart("Old ratio deviation", "mean |ratio - 1|")),
    Figure("advantage_mean", "–", "mean of the advantages of all tokens of the step", "sum", per="tokens", empty=0.0,
           chart=Chart("Advantage, mean", "over the tokens")),
    Figure("advantage_std", "–", "their standard deviation",
           chart=Chart("Advantage, standard deviation", "over the tokens")),
    Figure("nonzero_advantage_share", "share", "samples with an advantage other than zero", "sum", per="samples",
           chart=Chart("Zero advantage", "share of the samples", percent=True, complement=True)),
    Figure("stale_samples", "count", "the policy's part of the step's `stale_samples`", "sum", empty=0,
           chart=Chart("Stale samples", "samples")),
    Figure("max_staleness", "versions", "the greatest age of a trained sample", "max", empty=0),
    Figure("skipped_updates", "count",
           "1 if the step left the weights as they were, because the gradient was zero or not finite; otherwise 0",
           chart=Chart("Skipped updates", "steps")),
    Figure("value_loss", "–", "loss of `ppo`'s critic", chart=Chart("Value loss", "of the critic")),
    Figure("explained_variance", "share", "the part of the returns' variance that `ppo`'s critic explains",
           chart=Chart("Explained variance", "of the returns")),
    Figure("lr", "–", "learning rate", chart=Chart("Learning rate")),
    Figure("unsure_tokens", "tokens",
           "tokens drawn under `top_k`, `top_p` or `min_p` for which rounding may leave other tokens at the engine "
           "than at the trainer: see [Truncated distributions](workflows.md#truncated-distributions); left out if it "
           "is 0", "sum", hides_zero=True, chart=Chart("Unsure tokens")),
    Figure("padding_share", "share",
           "the positions of all forwards that are padding; 0 if samples lie end to end (`trainer.packing`)", "sum",
           per="positions", chart=Chart("Padding share")),
    Figure("merged_share", "share",
           "the tokens of trained samples, prompts included, that are not computed because another sample of the "
           "forward begins with them: see [Turns that extend each "
           "other](algorithms.md#turns-that-extend-each-other); left out if it is 0", "sum",
           per="sample_tokens", hides_zero=True, chart=Chart("Merged share", "of the samples' tokens", percent=True)),
    Figure("replayed_share", "share",
           "trained tokens that the trainer has computed with the experts of their engine; of policies with "
           "[`router_replay`](algorithms.md#router-replay)", "sum", per="trained_tokens",
           chart=Chart("Replayed experts", "share of the tokens", percent=True)),
    Figure("backward_s", "s", "forward and backward passes", "sum", empty=0.0),
    Figure("optimizer_s", "s", "optimizer step, and making the weights to publish, with the wait for its slots"),
    Figure("update_s", "s", "the part of it that computes the optimizer step"),
    Figure("gather_s", "s", "a shared pool: the part of it that gathers the new weights in the host's memory"),
    Figure("publish_s", "s", "publishing the new weights, until all instances have applied them"),
    Figure("pause_mean_s", "s",
           "of the new weights at an instance: from the last token of the interrupted turns until it generates again; "
           "the mean over the policy's instances", "mean"),
    Figure("pause_max_s", "s", "the longest such pause", "max"),
    Figure("transfer_mean_s", "s", "the part of the pause that copies the bytes, the mean", "mean"),
    Figure("transfer_max_s", "s", "the longest such copy", "max"),
    Figure("load_mean_s", "s", "the part of the pause that is the engine's own work, the mean", "mean"),
    Figure("load_max_s", "s", "the longest such work", "max"),
    Figure("loads_by_shm", "count",
           "instances that got the new weights through shared memory: see [the way of new "
           "weights](training-pool.md#the-way-of-new-weights)", "sum"),
    Figure("loads_by_cuda_ipc", "count", "instances that read them in the memory of the trainer's device", "sum"),
    Figure("probe_p99", "nats",
           "difference between the log-probabilities of an engine that has the new weights and the trainer's, of the "
           "tokens of a [probe](training-pool.md#proof-of-the-weights): the 99th percentile over the instances; left "
           "out without a probe"),
    Figure("probe_max", "nats", "the largest such difference", "max", chart=Chart("Proof of the weights", "nats")),
    Figure("reloaded_instances", "count",
           "instances that had to load the weights twice, because a difference was too large; left out if it is 0",
           "sum", hides_zero=True),
    Figure("pool_computing_s", "s",
           "a [shared pool](training-pool.md#what-a-run-shows), since the policy's optimizer step before: computing"),
    Figure("pool_slots_s", "s", "computing, the sum over its slots"),
    Figure("pool_idle_s", "s", "on its slots without a computation"),
    Figure("pool_swapping_s", "s", "on its way to its slots or from them"),
    Figure("pool_waiting_s", "s", "a computation was ready, and other policies had the slots"),
    Figure("pool_suspended_s", "s", "without slots and without work"),
    Figure("suspensions", "count", "a shared pool: suspensions of the policy"),
    Figure("swapped_mib", "MiB", "a shared pool: its state that moved between slots and the host's memory"),
    Figure("repeated_micro_batches", "count",
           "a shared pool: micro-batches that were trained again, because a slot worker was lost; each time counts"),
)  # fmt: skip

_OPPONENT: Final = (
    Figure("opponent_step", "steps", "the member of the pool that played: the policy as it was after this step"),
    Figure("opponent_games", "count", "its games in the step: trajectories in which both sides have a reward"),
    Figure("opponent_score", "share",
           "mean score of the policy in training: 1 for a game that it has won, 0.5 for a draw, 0 for a loss", "mean"),
    Figure("opponent_payoff", "reward", "mean reward of the policy in training", "mean"),
    Figure("opponent_elo", "rating", "of the member, after the step"),
    Figure("opponent_gap", "reward",
           "the most that a member wins on average against the policy's newest version in the pool; 0 if none wins"),
    Figure("elo", "rating", "of the policy in training, after the step"),
)  # fmt: skip

_PROCESS: Final = (
    Figure("loop_lag_ms", "ms", "the longest delay of the event loop since the last reading"),
    Figure("rss_mib", "MiB", "resident memory"),
    Figure("cpu_s", "s", "CPU time since the process began"),
    *(
        Figure(name, "count", meaning, hides_zero=True)
        for name, meaning in (
            ("mailbox_waiting",
             "requests that wait for the process's actors now; this and the next counts are left out if they are 0"),
            ("mailbox_running", "requests that are in work now"),
            ("mailbox_served", "served requests since the start, as all counts below"),
            ("mailbox_failed", "failed requests"),
            ("mailbox_cancelled", "cancelled requests"),
            ("open_calls", "calls to other processes without a reply now"),
            ("credit_waits", "calls that wait for credit now"),
            ("sent_requests", "calls to other processes"),
            ("expired_calls", "calls whose deadline passed"),
            ("lost_requests", "requests whose message or reply was lost"),
            ("refused_messages", "received messages that could not be decoded"),
        )
    ),
)  # fmt: skip

_DEVICE: Final = (
    Figure("device_busy_percent", "%",
           "each GPU of the machine by its UUID, as its driver reports it every second: the mean share of time in "
           "which it computed", "mean"),
    Figure("device_used_mib", "MiB", "the most memory in use, by any process", "max"),
)  # fmt: skip

_TABLES: Final[dict[Subject, tuple[Figure, ...]]] = {
    "step": _STEP, "agent": _AGENT, "policy": _POLICY, "opponent": _OPPONENT, "process": _PROCESS, "device": _DEVICE,
}  # fmt: skip
FIGURES: Final[Mapping[Subject, Mapping[str, Figure]]] = MappingProxyType(
    {subject: MappingProxyType({row.name: row for row in rows}) for subject, rows in _TABLES.items()}
)
"""All rows, by subject and name, in the order of the charts and of the metrics page."""

FAMILIES: Final[Mapping[str, str]] = MappingProxyType({
    "workflow": "the workflow’s own metrics in training: means over the trajectories of the step",
    "source": "figures of the query source at the end of the step",
    "filters": "samples of all agents that the [filter](modes.md#group-filters) of this name left out",
})  # fmt: skip
"""Prefixes of figures whose names are the user's, with their meanings."""


class UnknownFigure(ValueError):
    """A figure was measured or received that has no row."""

    def __init__(self, subject: Subject, name: str) -> None:
        near = difflib.get_close_matches(name, FIGURES[subject], 1)
        meant = f" (but {near[0]!r})" if near else ""
        super().__init__(
            f"{subject} has no figure {name!r}{meant}: a figure needs a row in actors/figures.py"
        )


def check_figures(subject: Subject, names: Iterable[str]) -> None:
    """Raises UnknownFigure for a name without a row."""
    rows = FIGURES[subject]
    for name in names:
        if name not in rows:
            raise UnknownFigure(subject, name)


_PER: Final = {subject: tuple(row for row in rows.values() if row.per) for subject, rows in FIGURES.items()}
_EMPTY: Final = {
    subject: {row.name: row.empty for row in rows.values() if row.empty is not None and not row.per}
    for subject, rows in FIGURES.items()
}


def divide_sums(subject: Subject, sums: Mapping[str, float], counts: Mapping[str, int]) -> Numbers:
    """The figures whose ``Figure.per`` is among ``counts``, from their sums."""
    numbers: Numbers = {}
    for row in _PER[subject]:
        count = counts.get(row.per)
        if count and row.name in sums:
            numbers[row.name] = sums[row.name] / count
        elif count is not None and row.empty is not None:
            numbers[row.name] = row.empty
    return numbers


def drop_hidden_zeros(subject: Subject, numbers: Numbers) -> Numbers:
    """The figures without those that are left out if they are 0. Raises KeyError for a name without a row."""
    rows = FIGURES[subject]
    return {name: value for name, value in numbers.items() if value or not rows[name].hides_zero}


class StepFigures:
    """The figures of one subject in one step, merged by the rules of their rows. Pure."""

    def __init__(self, subject: Subject) -> None:
        self._subject, self._rows = subject, FIGURES[subject]
        self._totals: Numbers = dict(_EMPTY[subject])
        self._values: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        """Adds a measurement. Raises UnknownFigure."""
        if (row := self._rows.get(name)) is None:
            raise UnknownFigure(self._subject, name)
        match row.merge:
            case "sum":
                self._totals[name] = self._totals.get(name, 0) + value
            case "max":
                self._totals[name] = max(self._totals.get(name, value), value)
            case "mean":  # of all values at once, because a running sum would be rounded each time
                self._values.setdefault(name, []).append(value)
            case "only":
                self._totals[name] = value

    def update(self, numbers: Mapping[str, float]) -> None:
        """Adds a measurement of each figure. Raises UnknownFigure."""
        for name, value in numbers.items():
            self.add(name, value)

    def numbers(self, counts: Mapping[str, int] = MappingProxyType({})) -> Numbers:
        """The step's figures. ``counts``: by ``Figure.per``; a figure that is per a missing one is left out."""
        numbers = {name: total for name, total in self._totals.items() if not self._rows[name].per}
        numbers |= divide_sums(self._subject, self._totals, counts)
        return numbers | {name: fmean(values) for name, values in self._values.items()}
