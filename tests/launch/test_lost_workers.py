"""Rollout workers of real runs that are killed or stopped: the run continues without a restart, and each sample is
trained once."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from .conftest import SIMULATED, Launched, Launcher, wait_until
from .run_files import trained_by_version

# A worker that is stopped is given up within 4 s: more than a busy machine keeps a process waiting. The end of one is
# seen without heartbeats.
SHORT_HEARTBEATS = ("supervision={heartbeat_s: 1.0, missed_heartbeats: 4, silence_s: 60.0}",)
STEPS, QUERIES, TRAJECTORIES = 3, 4, 2
SETTINGS = (
    *SIMULATED,
    f"training={{steps: {STEPS}, queries_per_step: {QUERIES}, trajectories_per_query: {TRAJECTORIES}, micro_batch: 4}}",
    "checkpoint.every=1",
    "rollout.workers=2",
)


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """The file that holds back the trajectories of the second step and of later ones."""
    hold = tmp_path / "hold"
    hold.write_text(str(QUERIES))
    return hold


@pytest.fixture(params=[()])
def held(
    request: pytest.FixtureRequest, launcher: Launcher, tmp_path: Path, hold: Path
) -> Iterator[Launched]:
    """A run with two workers that waits in its second step. The parameter: further settings."""
    settings: Sequence[str] = request.param
    run = launcher.train(f"workers-{tmp_path.name}", *SETTINGS, *settings, f"data.hold={hold}")
    run.wait_for_step(1)
    yield run
    run.close()


def lost(run: Launched) -> list[dict[str, object]]:
    return [event for event in run.events if event["event"] == "worker_lost"]


def restarts(run: Launched) -> list[dict[str, object]]:
    return [event for event in run.events if event["event"] == "actor_restarted"]


def wait_for_losses(run: Launched, count: int) -> None:
    wait_until(lambda: len(lost(run)) >= count, f"{count} losses")


def assert_ended_by_itself(run: Launched) -> None:
    assert run.wait() == 0, run.text
    assert "continuing" not in run.text
    names = Counter(event["event"] for event in run.events)
    assert names["run_started"] == 1 and not names["run_resumed"] and not names["trajectory_failed"]
    assert [line["step"] for line in run.metrics] == [*range(1, STEPS + 1)]
    assert {version: Counter(ids) for version, ids in trained_by_version(run.directory).items()} == {
        str(step): Counter(
            f"{step + 1}:q{step * QUERIES + query:03d}_0_{n}"
            for query in range(QUERIES)
            for n in range(TRAJECTORIES)
        )
        for step in range(STEPS)
    }
    restarted = sum(line["restarted_groups"] for line in run.metrics)
    assert restarted == sum(int(str(event["groups"])) for event in lost(run))
    run.assert_nothing_is_left()


def test_kills(held: Launched, hold: Path) -> None:
    """One worker after the other, then both at once, perhaps while they start; groups that the first had are the
    other's when that dies."""
    for losses, actors in ((1, ["rollout-0"]), (2, ["rollout-1"]), (2, ["rollout-0", "rollout-1"])):
        wait_until(lambda: {"rollout-0", "rollout-1"} <= held.actors().keys(), "both workers")
        for actor in actors:
            held.actors()[actor].kill()
        wait_for_losses(held, losses)
    wait_until(lambda: len(restarts(held)) == 4, "four restarts")
    hold.unlink()
    assert_ended_by_itself(held)
    assert [event["groups"] for event in lost(held)[:2]] == [QUERIES // 2, QUERIES]
    reasons = [str(event["reason"]) for event in restarts(held)]
    assert all("killed by signal 9" in reason for reason in reasons), reasons


@pytest.mark.parametrize("held", [SHORT_HEARTBEATS], indirect=True, ids=[""])
def test_one_that_is_stopped_for_longer_than_the_heartbeats_and_then_continued(
    held: Launched, hold: Path
) -> None:
    frozen = held.actors()["rollout-0"]
    frozen.suspend()
    wait_until(lambda: lost(held), "the loss")
    if frozen.is_running():
        frozen.resume()
    hold.unlink()
    assert_ended_by_itself(held)
    assert "silent for over" in str(lost(held)[0]["reason"])


def test_one_that_is_stopped_for_less_than_the_heartbeats_keeps_its_work(held: Launched, hold: Path) -> None:
    frozen = held.actors()["rollout-0"]
    frozen.suspend()
    time.sleep(0.6)  # the length of the stop
    frozen.resume()
    hold.unlink()
    assert_ended_by_itself(held)


def test_too_many_losses_end_the_run_which_its_restart_continues(
    launcher: Launcher, tmp_path: Path, hold: Path
) -> None:
    limits = ("supervision.max_restarts=1", "--restarts", "1")
    run = launcher.train(f"many-{tmp_path.name}", *SETTINGS, f"data.hold={hold}", *limits)
    run.wait_for_output("checkpoints/step_000001")
    for number in range(2):
        # First the losses: until the loss of a killed worker is known, that one may still be listed.
        wait_for_losses(run, number)
        wait_until(lambda: "rollout-1" in run.actors(), "the worker")
        run.actors()["rollout-1"].kill()
    run.wait_for_output("continuing after step 1")
    hold.unlink()
    assert run.wait() == 0, run.text
    assert "its supervisor has restarted 1 times within 3600 s" in run.text
    run.assert_nothing_is_left()
