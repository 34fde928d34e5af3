"""The keys and values of a step's line, of all that a run can measure."""

from dataclasses import replace

from flexmarl.actors.figures import FIGURES, Numbers
from flexmarl.actors.messages import (
    AgentTurns,
    GroupClosed,
    Loaded,
    MicroBatchTrained,
    PolicyStepped,
    Published,
    StepStats,
    TrajectoryFailure,
)
from flexmarl.actors.names import AgentName, PolicyName, Step, Version
from flexmarl.actors.orchestrator.recorder import StepRecord
from flexmarl.actors.step_metrics import SUBJECT_OF, StepMetrics
from flexmarl.launch.run_folder.json_lines import metrics_to_json
from flexmarl.transport.handle import PathName, StateHandle
from flexmarl.transport.statistics import Chosen

SOLVER, JUDGE, PAST = PolicyName("solver"), PolicyName("judge"), PolicyName("past")
OF_SOLVER, OF_JUDGE = AgentName("solver"), AgentName("judge")
FAILURE = TrajectoryFailure("t", "e", "")
OF_GROUP: Numbers = {
    "logged_trajectories": 0, "replaced_trajectories": 2, "oversampled_trajectories": 1, "limited_trajectories": 1,
    "retried_turns": 3,
    "resumed_turns": 2, "resumed_tokens": 9, "late_trajectories": 4, "gateway_merged": 5, "gateway_branched": 1,
    "gateway_masked": 2, "expired_sessions": 3, "closed_sessions": 2, "lost_sessions": 1,
    "shared_groups": 1,
    "reward_calls": 8, "reward_queue_s": 0.25, "reward_compute_s": 1.5, "repeated_rewards": 1, "overrun_rewards": 2,
    "branch_points": 4, "cut_lines": 3, "untrained_branch_turns": 2,
    "demonstrated_trajectories": 5, "patched_turns": 4, "departed_trajectories": 1,
    "explorations": 16, "explored_tokens": 90, "failed_explorations": 2, "unlike_explorations": 1,
}  # fmt: skip
OF_STEP: Numbers = {
    "loss": 0.5, "grad_norm": 1.5, "clip_fraction": 0.1, "ratio_deviation": 2e-6, "lr": 1e-3, "skipped_updates": 1,
    "padding_share": 0.25, "merged_share": 0.5, "value_loss": 0.3, "explained_variance": -0.5, "unsure_tokens": 3,
    "entropy": 0.75, "kl": 0.01, "advantage_mean": -0.1, "advantage_std": 0.9, "optimizer_s": 0.25,
    "update_s": 0.125, "replayed_share": 0.875,
    "pool_computing_s": 1.0, "pool_slots_s": 1.5, "pool_idle_s": 2.0, "pool_swapping_s": 3.0, "pool_waiting_s": 4.0,
    "pool_suspended_s": 5.0, "suspensions": 6, "swapped_mib": 3.5, "repeated_micro_batches": 8, "gather_s": 0.0625,
}  # fmt: skip
OF_GAMES: Numbers = {
    "opponent_step": 2, "opponent_games": 3, "opponent_score": 0.5, "opponent_payoff": 0.25, "opponent_elo": 1190.0,
    "opponent_gap": 0.75, "elo": 1210.0,
}  # fmt: skip
OF_PROCESS: Numbers = {
    "loop_lag_ms": 0.5, "rss_mib": 100.0, "cpu_s": 3.0, "mailbox_served": 7, "credit_waits": 2,
}  # fmt: skip
LINE = {
    "step": 3, "time_s": 64.5, "step_s": 10.0, "rollout_s": 11.0, "tokens": 120, "tokens_per_s": 12.0,
    "overlap_s": 5.0, "stale_samples": 3, "max_staleness": 1, "failed_trajectories": 1, "late_trajectories": 4,
    "replaced_trajectories": 2,
    "logged_trajectories": 0, "oversampled_trajectories": 1, "limited_trajectories": 1, "retried_turns": 3,
    "resumed_turns": 2,
    "resumed_tokens": 9, "dropped_groups": 1, "replaced_queries": 1, "carried_queries": 2,
    "submitted_queries": 1, "replayed_groups": 0,
    "failed_submitted_trajectories": 1, "restarted_groups": 2, "gateway_merged": 5, "gateway_branched": 1,
    "gateway_masked": 2, "expired_sessions": 3, "closed_sessions": 2, "lost_sessions": 1,
    "shared_groups": 1,
    "reward_calls": 8, "reward_queue_s": 0.25, "reward_compute_s": 1.5, "repeated_rewards": 1, "overrun_rewards": 2,
    "branch_points": 4, "cut_lines": 3, "untrained_branch_turns": 2,
    "demonstrated_trajectories": 5, "patched_turns": 4, "departed_trajectories": 1,
    "explorations": 16, "explored_tokens": 90, "failed_explorations": 2, "unlike_explorations": 1, "eval_s": 1.5,
    "environment_s": 0.0, "reward_s": 0.0, "tail_s": 0.0, "swap_s": 0.1875, "weights_s": 0.6875, "last_query": "q",
    "versions": {"solver": 8, "judge": 2},
    "generated_by": {"solver": 7, "judge": 2}, "reward/solver": 0.6785714285714286,
    "filters/equal_rewards": 1,
    "filtered_samples/solver": 1, "turns/solver": 12, "tokens/solver": 120, "truncated_turns/solver": 4,
    "queue_s/solver": 0.5, "service_s/solver": 3.0,
    "turn_tokens_p10/solver": 5.0, "turn_tokens_p50/solver": 10.0, "turn_tokens_p90/solver": 15.0,
    "turn_tokens_max/solver": 15.0, "turn_reward/solver": 0.3, "token_share/solver": 0.75, "gradient_share/solver": 0.5,
    "filtered_samples/judge": 0, "turns/judge": 0, "tokens/judge": 0, "truncated_turns/judge": 0,
    "token_share/judge": 0.25, "advantage_share/judge": 1.0, "carried_samples/solver": 2, "stale_samples/solver": 3,
    "max_staleness/solver": 1, "backward_s/solver": 6.0, "samples/solver": 6,
    "mean_tokens/solver": 10.166666666666666, "nonzero_advantage_share/solver": 0.8333333333333334,
    "loss/solver": 0.5, "grad_norm/solver": 1.5, "lr/solver": 0.001, "clip_fraction/solver": 0.1,
    "ratio_deviation/solver": 2e-06, "entropy/solver": 0.75, "kl/solver": 0.01, "advantage_mean/solver": -0.1,
    "advantage_std/solver": 0.9, "unsure_tokens/solver": 3, "padding_share/solver": 0.25,
    "merged_share/solver": 0.5, "replayed_share/solver": 0.875,
    "skipped_updates/solver": 1, "optimizer_s/solver": 0.25, "update_s/solver": 0.125, "publish_s/solver": 0.625,
    "pause_mean_s/solver": 0.8333333333333334, "pause_max_s/solver": 1.0,
    "transfer_mean_s/solver": 0.4166666666666667, "transfer_max_s/solver": 0.5, "loads_by_shm/solver": 1,
    "loads_by_cuda_ipc/solver": 1, "load_mean_s/solver": 0.2333333333333333, "load_max_s/solver": 0.3,
    "probe_p99/solver": 1.3e-06, "probe_max/solver": 1.3e-06,
    "value_loss/solver": 0.3, "explained_variance/solver": -0.5, "pool_computing_s/solver": 1.0,
    "pool_slots_s/solver": 1.5, "pool_idle_s/solver": 2.0, "pool_swapping_s/solver": 3.0, "pool_waiting_s/solver": 4.0,
    "pool_suspended_s/solver": 5.0, "suspensions/solver": 6, "swapped_mib/solver": 3.5,
    "repeated_micro_batches/solver": 8, "gather_s/solver": 0.0625, "carried_samples/judge": 0, "stale_samples/judge": 0,
    "max_staleness/judge": 0, "backward_s/judge": 0.0, "opponent_step/past": 2, "opponent_games/past": 3,
    "opponent_score/past": 0.5, "opponent_payoff/past": 0.25, "opponent_elo/past": 1190.0, "opponent_gap/past": 0.75,
    "elo/past": 1210.0,
    "loop_lag_ms/store": 0.5, "rss_mib/store": 100.0, "cpu_s/store": 3.0, "device_used_mib/GPU-1": 70000.0,
    "mailbox_served/store": 7, "credit_waits/store": 2, "actor.rows_ready/store": 5, "actor.puts/store": 0,
    "workflow/accuracy": 0.5, "eval/accuracy": 0.5,
}  # fmt: skip


def group(waited_s: float, rewards: list[float]) -> GroupClosed:
    turns = {
        OF_SOLVER: AgentTurns(
            {"turns": 3, "tokens": 30, "truncated_turns": 1, "queue_s": 0.125, "service_s": 0.75}, (5, 10, 15)
        ),
        OF_JUDGE: AgentTurns(),
    }
    return GroupClosed(Step(3), "q", {OF_SOLVER: 2}, turns, waited_s, {OF_SOLVER: rewards, OF_JUDGE: []}, [])


def loaded(pause_s: float, transfer_s: float, load_s: float, path: PathName) -> Loaded:
    chosen, differences = Chosen(path, "r", {}), (1e-6, 1e-6 * (1 + load_s))
    return Loaded(SOLVER, Version(8), pause_s, transfer_s, load_s, chosen, differences)


def complete_step() -> StepMetrics:
    step = StepRecord(Step(3), {SOLVER: Version(7), JUDGE: Version(2)}, [OF_SOLVER, OF_JUDGE], started=100.0)
    step.group_closed(group(2.0, [1.0, 0.25, 0.1]), now=103.0)
    second = group(1.0, [1.0, 1.0])
    step.group_closed(
        replace(
            second,
            filtered={"equal_rewards": {OF_SOLVER: 1}},
            figures=OF_GROUP,
            turn_rewards={OF_SOLVER: [0.5, 0.1]},
            metrics={"accuracy": [1.0, 0.0]},
        ),
        now=110.0,
    )
    step.group_closed(replace(group(1.0, [0.7]), dropped="x", failures=[FAILURE]), now=111.0)
    step.group_closed(replace(group(1.0, [0.7]), failures=[FAILURE]), now=112.0, submitted=True)
    step.figures.update(
        {"replaced_queries": 1, "carried_queries": 2, "submitted_queries": 1, "restarted_groups": 2}
    )
    step.trained(SOLVER, MicroBatchTrained(2, 20, {7: 2}, 2, 2.0), version=7, now=106.0)
    step.trained(SOLVER, MicroBatchTrained(4, 40, {7: 1, 6: 3}, 3, 4.0), version=7, now=113.0)
    shares: dict[AgentName, Numbers] = {
        OF_SOLVER: {"token_share": 0.75, "gradient_share": 0.5},
        OF_JUDGE: {"token_share": 0.25, "advantage_share": 1.0},
    }  # fmt: skip
    published = Published(SOLVER, Version(8), StateHandle("solver", 8, 0, 0, (), ()))
    step.optimizer_stepped(
        SOLVER, PolicyStepped(published, StepStats(6, 61, OF_STEP, shares), 0.125, [(0.5, 0.25)]), now=114.0
    )
    loads = [
        loaded(0.5, 0.25, 0.1, "shm"), loaded(1.0, 0.5, 0.3, "cuda_ipc"), loaded(1.0, 0.5, 0.3, "tcp")
    ]  # fmt: skip
    step.applied(SOLVER, loads, now=114.5)
    metrics = step.metrics({SOLVER: Version(8), JUDGE: Version(2)}, {SOLVER: 2}, 50.0, 104.5, 114.5)
    return replace(
        metrics,
        eval_s=1.5,
        evaluation={"accuracy": 0.5},
        by_opponent={PAST: OF_GAMES},
        by_process={"store": OF_PROCESS},
        by_device={"GPU-1": {"device_used_mib": 70000.0}},
        by_actor={"store": {"rows_ready": 5, "puts": 0}},
    )


def test_the_line_of_a_step_has_these_keys_and_values() -> None:
    line = metrics_to_json(complete_step())
    assert line == LINE
    assert {key: type(value) for key, value in line.items()} == {
        key: type(value) for key, value in LINE.items()
    }


def test_the_line_has_all_figures_that_a_step_can_have() -> None:
    """Without counts of a process that are 0, and a driver that does not report the load of its device."""
    named = {key.partition("/")[0] for key in LINE if "/" in key}
    rows = {
        row.name for subject in SUBJECT_OF.values() for row in FIGURES[subject].values() if not row.hides_zero
    }
    assert rows - named == {"device_busy_percent"}
    assert FIGURES["step"].keys() <= LINE.keys()
