"""Runs whose policies share a slot: the same losses, suspensions that show, slot workers that are killed or stopped."""

import json
from collections import Counter
from pathlib import Path

import pytest

from .conftest import SIMULATED_POLICIES, Launched, Launcher, wait_until
from .in_process import Finished, RunsHere
from .test_lost_workers import SHORT_HEARTBEATS, restarts

POOL = ("pool={name: shared, slots: 1}",)
SETTINGS = (*SIMULATED_POLICIES, "agent_defaults.model=null", "checkpoint.every=1")
STEPS, QUERIES = 4, 4
SIZES = f"training={{steps: {STEPS}, queries_per_step: {QUERIES}, trajectories_per_query: 2, micro_batch: 4}}"


def lost(run: Launched | Finished) -> list[dict[str, object]]:
    return [event for event in run.events if event["event"] == "slot_lost"]


def assert_ended_by_itself(run: Launched, like: Finished) -> None:
    assert run.wait() == 0, run.text
    assert_trained_once(run, like)
    run.assert_nothing_is_left()


def assert_trained_once(run: Launched | Finished, like: Finished) -> None:
    """The run was not restarted, and its last checkpoint is that of ``like``: each sample was trained once."""
    assert "continuing" not in run.text
    names = Counter(event["event"] for event in run.events)
    assert names["run_started"] == 1 and not names["run_resumed"] and not names["trajectory_failed"]
    assert [line["step"] for line in run.metrics] == [*range(1, STEPS + 1)]
    for policy in ("solver", "checker"):
        found, wanted = (_trained(each, policy) for each in (run, like))
        assert found == wanted


def _hold_after(hold: Path, step: int) -> None:
    """Holds the trajectories of later steps back."""
    new = hold.with_suffix(".new")
    new.write_text(str(QUERIES * step))
    new.rename(hold)


def _trained(run: Launched | Finished, policy: str) -> dict[str, object]:
    file = run.directory / "checkpoints" / f"step_{STEPS:06d}" / policy / "simulated_policy.json"
    trained: dict[str, object] = json.loads(file.read_text())
    return trained


@pytest.fixture(scope="module")
def static(runs_here: RunsHere) -> Finished:
    """The same run with a static pool."""
    run = runs_here.train("static", *SETTINGS, SIZES)
    assert run.status == 0, run.text
    return run


def test_a_shared_pool_trains_the_same_and_shows_its_suspensions(
    runs_here: RunsHere, static: Finished
) -> None:
    run = runs_here.train("shared", *SETTINGS, SIZES, *POOL)
    assert run.status == 0 and not run.problems, run.text
    assert_trained_once(run, static)
    assert not lost(run), "at its end the run loses none"
    suspensions = [event for event in run.events if event["event"] == "policy_suspended"]
    assert suspensions and all(event["slots"] == "slot-0" and event["reason"] for event in suspensions)
    last = run.metrics[-1]
    for policy in ("solver", "checker"):
        for key in ("computing", "idle", "swapping", "waiting", "suspended"):
            assert last[f"pool_{key}_s/{policy}"] >= 0
        assert last[f"suspensions/{policy}"] >= 1 and last[f"repeated_micro_batches/{policy}"] == 0
    assert not any(key.startswith("pool_") for key in static.metrics[-1])


@pytest.mark.parametrize("slots", [1, 2])
def test_kills(launcher: Launcher, tmp_path: Path, static: Finished, slots: int) -> None:
    """One worker after each step, and then all at once: the next step begins at that moment."""
    names = {f"slot-{number}" for number in range(slots)}
    pool = f"pool={{name: shared, slots: {slots}}}"
    hold = tmp_path / "hold"
    _hold_after(hold, 1)
    run = launcher.train(f"kills-{tmp_path.name}", *SETTINGS, SIZES, pool, f"data.hold={hold}")
    for step, killed in enumerate([{"slot-0"}, {f"slot-{slots - 1}"}, names], 1):
        run.wait_for_step(step)
        wait_until(lambda: names <= run.actors().keys(), "the slot workers")
        for name in killed:
            run.actors()[name].kill()
        _hold_after(hold, step + 1)  # last: the run might come to its end before the kills
    assert_ended_by_itself(run, static)
    reasons = [event for event in restarts(run) if str(event["actor"]) in names]
    # One that comes back a moment before the run's end may be missed as it closes.
    died = [event for event in lost(run) if not str(event["reason"]).endswith("is closed")]
    assert len(reasons) == 2 + slots and 2 <= len(died) <= 2 + slots, "some while they start"
    assert all("killed by signal 9" in str(event["reason"]) for event in reasons)


def test_one_that_is_stopped_for_longer_than_the_heartbeats_and_then_continued(
    launcher: Launcher, tmp_path: Path, static: Finished
) -> None:
    hold = tmp_path / "hold"
    _hold_after(hold, 2)
    settings = (*SETTINGS, *SHORT_HEARTBEATS, SIZES, *POOL, f"data.hold={hold}")
    run = launcher.train(f"stopped-{tmp_path.name}", *settings)
    run.wait_for_step(2)
    frozen = run.actors()["slot-0"]
    frozen.suspend()
    hold.unlink()
    wait_until(lambda: lost(run), "the loss")
    if frozen.is_running():
        frozen.resume()
    assert_ended_by_itself(run, static)
    assert "silent for over" in str(lost(run)[0]["reason"])
