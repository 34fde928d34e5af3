"""A whole run whose trainer and instances are on simulated devices."""

from pathlib import Path

from ..conftest import REPRODUCIBLE, UNCHECKED, Launcher
from ..in_process import Finished

PRELUDE = f"""{UNCHECKED}
import os
from flexmarl.launch.run import actor_specs
os.environ["PYTHONPATH"] += ":{Path(__file__).parents[3]}"
actor_specs._TRAINER = "tests.fake_device_actors:Trainer"
actor_specs._INSTANCE = "tests.fake_device_actors:Instance"
"""


def test_weights_stay_on_the_device_and_the_run_learns_the_same(
    launcher: Launcher, undisturbed: Finished
) -> None:
    run = launcher.train("devices", *REPRODUCIBLE, f"data.trace={launcher.runs / 'trace'}", prelude=PRELUDE)
    assert run.wait() == 0, run.text
    run.assert_logs_are_clean()
    run.assert_nothing_is_left()
    chosen = [event for event in run.events if event["event"] == "weights_path_chosen"]
    assert sorted(event["instance"] for event in chosen) == ["checker-0", "solver-0"], (
        "once each: it never changed"
    )
    assert {event["path"] for event in chosen} == {"cuda_ipc"}
    for ours, theirs in zip(run.metrics, undisturbed.metrics, strict=True):
        for policy in ("solver", "checker"):
            assert ours[f"loads_by_cuda_ipc/{policy}"] == theirs[f"loads_by_shm/{policy}"] == 1
            assert f"loads_by_shm/{policy}" not in ours
            assert ours[f"loss/{policy}"] == theirs[f"loss/{policy}"]
    # Statistics of processes are up to a second old, and as old as the run at its end.
    statistics = [key for row in run.metrics for key in row if key.startswith("actor.transport_")]
    assert not [key for key in statistics if "shm_gets/solver" in key or "shm_gets/checker" in key]
    assert {event["path"] for event in undisturbed.events if event["event"] == "weights_path_chosen"} == {
        "shm"
    }
