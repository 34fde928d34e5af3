"""A step's line of metrics, from events at given times."""

from dataclasses import replace

import pytest

from flexmarl.actors.messages import GroupClosed, MicroBatchTrained, PolicyStepped, Published
from flexmarl.actors.orchestrator.recorder import StepRecord
from flexmarl.transport.handle import StateHandle


def closed(waited_s: float, rewards: list[float]) -> GroupClosed:
    return GroupClosed(3, "q", {"a": len(rewards)}, 10, waited_s, {"a": rewards}, [])


def trained(busy_s: float, versions: dict[int, int]) -> MicroBatchTrained:
    return MicroBatchTrained(sum(versions.values()), 20, versions, 2, busy_s)


def stepped(version: int) -> PolicyStepped:
    handle = StateHandle("a", version, "shm", "host", "process", "a", 0, 1, 0, 0, ())
    return PolicyStepped(
        Published("a", version, handle), 4, 40, 0.5, 1.5, 1e-3, 0.1, 2e-6, busy_s=0.25, publish_s=0.125
    )


def record() -> StepRecord:
    """Started at 100 s; turns from 101 s; rolled out at 110 s; backward 104-106, 105-107 (shared) and 109-113."""
    record = StepRecord(3, {"a": 7}, started=100.0)
    record.group_closed(closed(2.0, [1.0, 0.0]), 2, now=103.0)
    record.trained("a", trained(2.0, {7: 2}), version=7, now=106.0)
    record.trained("a", trained(2.0, {7: 2}), version=7, now=107.0)
    record.group_closed(closed(1.0, [1.0, 1.0]), 2, now=110.0)
    record.trained("a", trained(4.0, {7: 1, 6: 3}), version=7, now=113.0)
    return record


def test_overlap_counts_every_second_once_and_only_while_rollouts_run() -> None:
    assert record().overlap_s() == pytest.approx(3.0 + 1.0)


def test_the_wait_for_a_version_is_no_rollout() -> None:
    assert record().rollout_s() == pytest.approx(9.0)


def test_the_line() -> None:
    step = record()
    step.optimizer_stepped("a", stepped(8), now=114.0)
    step.applied("a", now=114.5)
    line = step.metrics({"a": 8}, {"a": 2}, run_started=50.0, previous_end=104.5, now=114.5)
    assert line["step"] == 3 and line["time_s"] == 64.5 and line["step_s"] == 10.0
    assert line["versions"] == {"a": 8} and line["generated_by"] == {"a": 7}
    assert line["tokens"] == 20 and line["tokens_per_s"] == 2.0
    assert line["mean_tokens/a"] == 10.0
    assert line["reward/a"] == 0.75 and line["samples/a"] == 4 and line["nonzero_advantage_share/a"] == 1.5
    assert line["backward_s/a"] == 8.0 and line["publish_s/a"] == 0.625
    assert line["clip_fraction/a"] == 0.1 and line["ratio_deviation/a"] == 2e-6
    assert line["stale_samples"] == 3, "samples of another version are counted from the rows themselves"
    assert line["max_staleness"] == 1 and line["carried_samples/a"] == 2
    assert not any("value" in key or "explained" in key for key in line), "there is no critic"


def test_a_critics_figures_are_shown_where_there_are_any() -> None:
    step = record()
    step.optimizer_stepped("a", replace(stepped(8), value_loss=0.25), now=114.0)
    step.applied("a", now=114.5)
    line = step.metrics({"a": 8}, {}, run_started=50.0, previous_end=104.5, now=114.5)
    assert line["value_loss/a"] == 0.25 and "explained_variance/a" not in line
    step.optimizer_stepped("a", replace(stepped(8), value_loss=0.25, explained_variance=-0.5), now=114.0)
    line = step.metrics({"a": 8}, {}, run_started=50.0, previous_end=104.5, now=114.5)
    assert line["explained_variance/a"] == -0.5


def test_what_became_of_groups_is_counted() -> None:
    step = StepRecord(1, {"a": 0, "b": 0}, started=0.0)
    group = closed(0.0, [1.0, 1.0])
    step.group_closed(replace(group, dropped="no signal", zero_advantage=["a"], replaced=2), 2, now=1.0)
    step.group_closed(replace(group, zero_advantage=["a"], oversampled=3), 2, now=2.0)
    for _ in range(2):
        step.group_closed(replace(group, resumed_turns=2, resumed_tokens=30), 2, now=2.0)
    line = step.metrics({"a": 0, "b": 0}, {}, 0.0, 0.0, 3.0)
    assert line["dropped_groups"] == 1 and line["replaced_trajectories"] == 2
    assert line["oversampled_trajectories"] == 3
    assert (line["resumed_turns"], line["resumed_tokens"]) == (4, 60)
    assert line["zero_advantage_groups/a"] == 2 and line["zero_advantage_groups/b"] == 0


def test_an_agent_nobody_called_keeps_its_version() -> None:
    step = StepRecord(1, {"a": 0, "b": 5}, started=0.0)
    line = step.metrics({"a": 0, "b": 5}, {}, 0.0, 0.0, 1.0)
    assert line["versions"] == {"a": 0, "b": 5} and "reward/b" not in line
