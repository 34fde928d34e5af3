"""A step's metrics, from events at given times."""

from dataclasses import replace

import pytest

from flexmarl.actors.messages import (
    AgentTurns,
    GroupClosed,
    Loaded,
    MicroBatchTrained,
    PolicyStepped,
    Published,
    StepStats,
    WeightsMismatch,
)
from flexmarl.actors.names import AgentName, PolicyName, Step, Version
from flexmarl.actors.orchestrator.recorder import StepRecord
from flexmarl.actors.step_metrics import StepMetrics
from flexmarl.launch.run_folder.json_lines import metrics_from_json, metrics_to_json
from flexmarl.transport.handle import StateHandle
from flexmarl.transport.statistics import Chosen

A, B = PolicyName("a"), PolicyName("b")
SHARED = PolicyName("shared")
AGENT = AgentName("a")
BY_DEVICE, BY_HOST = Chosen("cuda_ipc", "the same host", {}), Chosen("shm", "the same host", {})
LOADED = [
    Loaded(A, Version(8), 0.5, 0.25, 0.125, BY_HOST),
    Loaded(A, Version(8), 1.0, 0.5, 0.25, BY_HOST),
]


def closed(waited_s: float, rewards: list[float]) -> GroupClosed:
    turns = AgentTurns({"turns": len(rewards), "tokens": 10, "truncated_turns": 1})
    return GroupClosed(Step(3), "q", {AGENT: len(rewards)}, {AGENT: turns}, waited_s, {AGENT: rewards}, [])


def trained(busy_s: float, versions: dict[int, int]) -> MicroBatchTrained:
    return MicroBatchTrained(sum(versions.values()), 20, versions, 2, busy_s)


def stepped(version: int, **more: float) -> PolicyStepped:
    handle = StateHandle("a", version, 0, 0, (), ())
    figures = {
        "loss": 0.5, "grad_norm": 1.5, "lr": 1e-3, "clip_fraction": 0.1, "ratio_deviation": 2e-6, "entropy": 0.75,
        "kl": 0.01, "advantage_mean": -0.1, "advantage_std": 0.9, "optimizer_s": 0.25,
    }  # fmt: skip
    stats = StepStats(4, 40, {**figures, **more})
    return PolicyStepped(Published(A, Version(version), handle), stats, publish_s=0.125)


def record() -> StepRecord:
    """Started at 100 s; turns from 101 s; rolled out at 110 s; backward 104-106, 105-107 (shared) and 109-113."""
    record = StepRecord(Step(3), {A: Version(7)}, [AGENT], started=100.0)
    record.group_closed(closed(2.0, [1.0, 0.0]), now=103.0)
    record.trained(A, trained(2.0, {7: 2}), version=7, now=106.0)
    record.trained(A, trained(2.0, {7: 2}), version=7, now=107.0)
    record.group_closed(closed(1.0, [1.0, 1.0]), now=110.0)
    record.trained(A, trained(4.0, {7: 1, 6: 3}), version=7, now=113.0)
    return record


def test_overlap_counts_every_second_once_and_only_while_rollouts_run() -> None:
    assert record().overlap_s() == pytest.approx(3.0 + 1.0)


def test_the_tail_begins_when_each_open_group_waits_for_one_trajectory() -> None:
    step = StepRecord(Step(3), {A: Version(7)}, [AGENT], started=100.0)
    step.group_closed(replace(closed(1.0, [1.0]), query="q1", tail_s=1.0), now=106.0)
    step.group_closed(replace(closed(1.0, [1.0]), query="q2", tail_s=7.0), now=110.0)
    assert step.tail_s() == pytest.approx(5.0), "until 105 s the first group waited for more"
    metrics = ended(step)
    assert metrics.last_query == "q2" and metrics.figures["tail_s"] == pytest.approx(5.0)
    assert metrics_from_json(metrics_to_json(metrics)) == metrics


def test_moves_after_the_rollout_count_where_no_policy_computes() -> None:
    """Moves from 108 s to 115 s; rollouts end at 110 s, micro-batches are computed until 113 s, the update until 114
    s."""
    step = record()
    result = replace(stepped(8, update_s=0.5), moves=[(7.0, 3.0), (2.5, 0.0)])
    step.optimizer_stepped(A, replace(result, publish_s=1.0), now=115.0)
    assert step.swap_s() == pytest.approx(0.5 + 1.0)
    asynchronous = StepRecord(Step(3), {A: Version(7)}, [AGENT], started=100.0, overlaps_itself=False)
    asynchronous.group_closed(closed(1.0, [1.0]), now=110.0)
    asynchronous.optimizer_stepped(A, result, now=115.0)
    assert asynchronous.swap_s() == 0.0


def test_new_weights_count_where_no_policy_computes_and_no_state_moves() -> None:
    """Weights are on their way from 114 s, the end of the update, to 120 s; states move until 115 s and from 116 s to
    117 s."""
    step = record()
    result = replace(stepped(8, update_s=0.5), moves=[(7.0, 3.0), (2.5, 0.0)], publish_s=1.0)
    step.optimizer_stepped(A, result, now=115.0)
    other = replace(stepped(8), moves=[(3.0, 2.0)], publish_s=0.0)
    step.optimizer_stepped(A, replace(other, publish_s=5.0), now=119.0)
    step.applied(A, LOADED, now=120.0)
    assert step.weights_s() == pytest.approx(1.0 + 3.0)
    assert ended(step).figures["weights_s"] == pytest.approx(4.0)
    asynchronous = StepRecord(Step(3), {A: Version(7)}, [AGENT], started=100.0, overlaps_itself=False)
    asynchronous.group_closed(closed(1.0, [1.0]), now=110.0)
    asynchronous.optimizer_stepped(A, result, now=115.0)
    asynchronous.applied(A, LOADED, now=116.0)
    assert asynchronous.weights_s() == 0.0


def test_the_wait_for_a_version_is_no_rollout() -> None:
    assert record().rollout_s() == pytest.approx(9.0)


def ended(step: StepRecord, carried: int = 0) -> StepMetrics:
    return step.metrics({A: Version(8)}, {A: carried}, run_started=50.0, previous_end=104.5, now=114.5)


def test_the_metrics() -> None:
    step = record()
    step.optimizer_stepped(A, stepped(8), now=114.0)
    step.applied(A, LOADED, now=114.5)
    metrics = ended(step, carried=2)
    policy = metrics.by_policy[A]
    assert metrics.step == 3 and metrics.time_s == 64.5 and metrics.step_s == 10.0
    assert metrics.versions == {A: 8} and metrics.generated_by == {A: 7}
    assert metrics.tokens == 20 and metrics.tokens_per_s == 2.0
    assert policy["mean_tokens"] == 10.0
    assert metrics.by_agent == {
        "a": {"reward": 0.75, "turns": 4, "tokens": 20, "truncated_turns": 2, "filtered_samples": 0}
    }
    assert policy["samples"] == 4 and policy["nonzero_advantage_share"] == 1.5
    assert policy["backward_s"] == 8.0 and policy["publish_s"] == 0.625
    assert (policy["pause_mean_s"], policy["pause_max_s"]) == (0.75, 1.0)
    assert (policy["transfer_mean_s"], policy["transfer_max_s"]) == (0.375, 0.5)
    assert (policy["load_mean_s"], policy["load_max_s"]) == (0.1875, 0.25)
    assert (policy["entropy"], policy["kl"]) == (0.75, 0.01)
    assert (policy["advantage_mean"], policy["advantage_std"]) == (-0.1, 0.9)
    assert policy["clip_fraction"] == 0.1 and policy["ratio_deviation"] == 2e-6
    assert metrics.figures["stale_samples"] == 3, (
        "samples of another version are counted from the rows themselves"
    )
    assert metrics.figures["max_staleness"] == 1 and policy["carried_samples"] == 2
    assert not {"value_loss", "explained_variance"} & policy.keys(), "there is no critic"


def test_shares_of_a_policy_are_figures_of_its_agents() -> None:
    step, result = two_policies(), stepped(8)
    shares = {AGENT: {"token_share": 0.75}, AgentName("b"): {"token_share": 0.25, "advantage_share": 1.0}}
    step.optimizer_stepped(A, replace(result, stats=replace(result.stats, by_agent=shares)), now=2.0)
    found = step.metrics({A: Version(0), B: Version(5)}, {}, 0.0, 0.0, 3.0).by_agent
    assert found[AGENT]["token_share"] == 0.75 and "advantage_share" not in found[AGENT]
    of_b = found[AgentName("b")]
    assert (of_b["token_share"], of_b["advantage_share"]) == (0.25, 1.0)


def test_quantiles_are_lengths_of_turns_of_all_groups() -> None:
    step = two_policies()
    for lengths in ((7, 1, 3), (9, 2), (5, 4, 10, 6, 8)):
        turns = AgentTurns({"turns": len(lengths), "tokens": sum(lengths)}, lengths)
        step.group_closed(replace(closed(0.0, [1.0]), turns={AGENT: turns}), now=1.0)
    found = step.metrics({A: Version(0), B: Version(5)}, {}, 0.0, 0.0, 3.0).by_agent
    of_a = found[AGENT]
    assert (
        of_a["turn_tokens_p10"],
        of_a["turn_tokens_p50"],
        of_a["turn_tokens_p90"],
        of_a["turn_tokens_max"],
    ) == (
        1,
        5,
        9,
        10,
    )
    assert "turn_tokens_p50" not in found[AgentName("b")], "it had no turn"


def test_a_critics_figures_are_shown_if_there_are_any() -> None:
    step = record()
    step.optimizer_stepped(A, stepped(8, value_loss=0.25), now=114.0)
    step.applied(A, LOADED, now=114.5)
    policy = ended(step).by_policy[A]
    assert policy["value_loss"] == 0.25 and "explained_variance" not in policy
    step.optimizer_stepped(A, stepped(8, value_loss=0.25, explained_variance=-0.5), now=114.0)
    assert ended(step).by_policy[A]["explained_variance"] == -0.5


def two_policies() -> StepRecord:
    return StepRecord(Step(1), {A: Version(0), B: Version(5)}, [AgentName("a"), AgentName("b")], started=0.0)


def test_what_became_of_groups_is_counted() -> None:
    step = two_policies()
    group = closed(0.0, [1.0, 1.0])
    step.group_closed(
        replace(
            group,
            dropped="no signal",
            filtered={"equal_rewards": {AGENT: 2}},
            figures={"replaced_trajectories": 2},
        ),
        now=1.0,
    )
    step.group_closed(
        replace(
            group,
            filtered={"equal_rewards": {AGENT: 4}, "overlong": {AGENT: 1, AgentName("b"): 1}},
            figures={"oversampled_trajectories": 3},
        ),
        now=2.0,
    )
    for _ in range(2):
        step.group_closed(replace(group, figures={"resumed_turns": 2, "resumed_tokens": 30}), now=2.0)
    metrics = step.metrics({A: Version(0), B: Version(5)}, {}, 0.0, 0.0, 3.0)
    assert metrics.figures["dropped_groups"] == 1 and metrics.figures["replaced_trajectories"] == 2
    assert metrics.figures["oversampled_trajectories"] == 3
    assert (metrics.figures["resumed_turns"], metrics.figures["resumed_tokens"]) == (4, 60)
    counts = {name: agent["filtered_samples"] for name, agent in metrics.by_agent.items()}
    assert counts == {"a": 7, "b": 1}
    assert metrics.filters == {"equal_rewards": 6, "overlong": 2}


def test_an_agent_without_a_turn_keeps_its_version() -> None:
    metrics = two_policies().metrics({A: Version(0), B: Version(5)}, {}, 0.0, 0.0, 1.0)
    assert metrics.versions == {"a": 0, "b": 5}
    assert "reward" not in metrics.by_agent[AgentName("b")]


def test_two_agents_on_one_policy_have_two_rewards_and_one_loss() -> None:
    step = StepRecord(Step(1), {SHARED: Version(7)}, [AgentName("a"), AgentName("b")], started=0.0)
    step.group_closed(replace(closed(0.0, []), rewards={AGENT: [1.0, 0.0], AgentName("b"): [0.25]}), now=1.0)
    step.trained(SHARED, trained(1.0, {7: 3, 5: 1}), version=7, now=2.0)
    step.optimizer_stepped(SHARED, stepped(8), now=3.0)
    step.applied(SHARED, [], now=3.0)
    metrics = step.metrics({SHARED: Version(8)}, {}, 0.0, 0.0, 3.0)
    assert {name: agent["reward"] for name, agent in metrics.by_agent.items()} == {"a": 0.5, "b": 0.25}
    (policy,) = metrics.by_policy.values()
    assert (metrics.versions[SHARED], policy["loss"], policy["samples"]) == (8, 0.5, 4)
    assert not {"pause_mean_s", "load_max_s"} & policy.keys(), "no instance has acknowledged them"
    assert (policy["stale_samples"], policy["max_staleness"]) == (1, 2)


def test_loads_are_counted_by_their_path() -> None:
    step = record()
    step.optimizer_stepped(A, stepped(8), now=113.5)
    by_device = Loaded(A, Version(8), 0.5, 0.25, 0.125, BY_DEVICE)
    step.applied(A, [*LOADED, by_device, Loaded(A, Version(8), 0.5, 0.25, 0.125)], now=114.5)
    measured = ended(step).by_policy[A]
    assert (measured["loads_by_shm"], measured["loads_by_cuda_ipc"]) == (2, 1)


def test_the_differences_of_all_instances_probes_have_a_percentile_and_a_maximum() -> None:
    step = record()
    step.optimizer_stepped(A, stepped(8), now=113.5)
    one, other = (
        replace(LOADED[0], differences=tuple(number * 1e-3 for number in range(start, 200, 2)))
        for start in (0, 1)
    )
    step.applied(A, [one, replace(other, mismatch=WeightsMismatch(0.5, 0.01, "wrong: layer 0"))], now=114.5)
    measured = ended(step).by_policy[A]
    assert measured["probe_p99"] == pytest.approx(0.197)
    assert measured["probe_max"] == pytest.approx(0.199)
    assert measured["reloaded_instances"] == 1


def test_a_version_without_a_probe_has_no_figures_of_one() -> None:
    step = record()
    step.optimizer_stepped(A, stepped(8), now=113.5)
    step.applied(A, LOADED, now=114.5)
    assert not {"probe_p99", "probe_max", "reloaded_instances"} & ended(step).by_policy[A].keys()


def test_the_workflows_metrics_and_rewards_of_turns_are_means_over_the_step() -> None:
    step = StepRecord(Step(3), {A: Version(7)}, [AGENT], started=100.0)
    for values in ([1.0, 0.0, 1.0], [0.0]):
        group = replace(closed(1.0, values), metrics={"accuracy": values}, turn_rewards={AGENT: values})
        step.group_closed(group, now=103.0)
    found = ended(step)
    assert found.workflow == {"accuracy": 0.5}
    assert found.by_agent[AGENT]["turn_reward"] == 0.5
    assert "turn_reward" not in ended(record()).by_agent[AGENT]
    line = metrics_to_json(found)
    assert (line["workflow/accuracy"], line[f"turn_reward/{AGENT}"]) == (0.5, 0.5)
    assert metrics_from_json(line) == found
