"""Reward services of real runs: a killed process, and a killed service, cost a call again, and no sample."""

import contextlib
from pathlib import Path

import psutil

from .conftest import SIMULATED, Launcher, wait_until
from .in_process import RunsHere
from .run_files import trained

STEPS, QUERIES, TRAJECTORIES = 3, 2, 2
SETTINGS = (
    *SIMULATED,
    f"training={{steps: {STEPS}, queries_per_step: {QUERIES}, trajectories_per_query: {TRAJECTORIES}, micro_batch: 4}}",
    "checkpoint.every=1",
    "data.shape=scored",
)


def computing(hold: Path) -> set[int]:
    """The processes in which a reward waits until ``hold`` allows it."""
    return {pid for file in hold.parent.glob("hold.*") if runs(pid := int(file.suffix[1:]))}


def runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def test_a_killed_process_and_a_killed_service_cost_no_sample(launcher: Launcher, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.write_text(str(QUERIES))  # from step 2 on
    services = "rewards={services: 1, processes: 2, timeout_s: 600}"
    run = launcher.train("rewards", *SETTINGS, services, f"data.hold_rewards={hold}")
    wait_until(lambda: len(computing(hold)) == 2, "two of the four rewards of step 2 are computed")
    first = computing(hold)
    psutil.Process(min(first)).kill()
    wait_until(lambda: len(computing(hold) - first) == 1, "the call begins again in a new process")
    hold.write_text(str(2 * QUERIES))  # from step 3 on
    run.wait_for_step(2)
    wait_until(lambda: len(computing(hold)) == 2, "two of the four rewards of step 3 are computed")
    second = computing(hold)
    run.actors()["rewards-0"].kill()
    wait_until(lambda: not any(map(runs, second)), "the processes of the service end with it")
    wait_until(lambda: len(computing(hold)) == 2, "the new service computes")
    hold.unlink()
    assert run.wait() == 0, run.text
    assert [event["actor"] for event in run.events if event["event"] == "actor_restarted"] == ["rewards-0"]
    assert [line["step"] for line in run.metrics] == [*range(1, STEPS + 1)]
    assert sum(line["failed_trajectories"] for line in run.metrics) == 0
    assert [line["reward_calls"] for line in run.metrics] == [QUERIES * TRAJECTORIES] * STEPS
    assert "repeated_rewards" not in run.metrics[0] and run.metrics[1]["repeated_rewards"] == 1
    assert 2 <= run.metrics[2]["repeated_rewards"] <= QUERIES * TRAJECTORIES, "also those in its queue"
    counts = trained(run.directory)
    assert len(counts) == STEPS * QUERIES * TRAJECTORIES and set(counts.values()) == {1}
    run.assert_nothing_is_left()


def test_a_reward_that_hangs_fails_its_trajectory_by_name(runs_here: RunsHere, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.write_text("1")
    run = runs_here.train(
        "hangs", *SETTINGS, "training.steps=1", "rewards={services: 1, timeout_s: 2}", "rollout.max_failed_share=1",
        f"data.hold_rewards={hold}",
    )  # fmt: skip
    assert run.status == 0, run.text
    (line,) = run.metrics
    assert line["failed_trajectories"] == line["overrun_rewards"] == TRAJECTORIES
    assert line["reward_calls"] == QUERIES * TRAJECTORIES
    failures = [event["error"] for event in run.events if event["event"] == "trajectory_failed"]
    assert failures and all(
        "TimeoutError: workflow.score took longer than rewards.timeout_s=2" in text for text in failures
    )
