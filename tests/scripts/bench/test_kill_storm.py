"""A short storm: actors of a real run are killed, and every sample is trained once all the same."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flexmarl.launch.bench.namespaces import Host
from scripts.bench import kill_storm

from ...patience import PATIENCE_S
from . import warm_runs

QUERIES = 2


def samples(steps: int) -> int:
    return steps * QUERIES * kill_storm.TRAJECTORIES * 9


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kill_storm, "QUERIES", QUERIES)
    monkeypatch.setattr(kill_storm, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(kill_storm, "COMMAND", (sys.executable, "-c", warm_runs.MAIN))
    usual = kill_storm.Storm._start

    def start(storm: kill_storm.Storm, host: Host | None, *arguments: str) -> Any:
        """As ever with a clock of its own: it is a library that a new process loads."""
        if storm._clock is not None:
            return usual(storm, host, *arguments)
        with storm._output.open("ab") as output:
            return warm_runs.start(arguments, output)

    monkeypatch.setattr(kill_storm.Storm, "_start", start)


def test_every_sample_is_trained_once_after_kills_of_any_actor(tmp_path: Path) -> None:
    storm = kill_storm.Storm(tmp_path, 12, kill_storm.drawn(2, seed=4), restarts=False, clock=False)
    lives = storm.blow()
    assert len([life for life in lives if life.struck]) >= 2 and lives[-1].status == 0
    assert kill_storm.check(tmp_path / "run", 12) == samples(12)


def test_a_run_that_may_restart_ends_by_itself_also_after_stops_and_steps_of_the_clock(
    tmp_path: Path,
) -> None:
    strikes = kill_storm.drawn(2, seed=3, faults="mixed")
    assert {bool(strike.stopped_s) for strike in strikes} == {True, False}
    (life,) = kill_storm.Storm(tmp_path, 12, strikes, restarts=True, clock=True).blow()
    assert life.status == 0 and life.struck
    assert kill_storm.check(tmp_path / "run", 12) == samples(12)


def test_a_run_whose_rollout_and_slot_workers_are_struck_ends_by_itself(tmp_path: Path) -> None:
    kinds = ["rollout", "gangs"]
    actors = [actor for kind in kinds for actor in kill_storm.RESTARTED[kind]]
    strikes = kill_storm.drawn(4, seed=20, faults="mixed", actors=actors)
    assert {(strike.actor.partition("-")[0], bool(strike.stopped_s)) for strike in strikes} == {
        ("rollout", False), ("rollout", True), ("slot", False), ("slot", True)
    }  # fmt: skip
    storm = kill_storm.Storm(tmp_path, 18, strikes, restarts=False, clock=False, several=kinds)
    (life,) = storm.blow()
    assert life.status == 0 and len(life.struck) == 4
    assert kill_storm.check(tmp_path / "run", 18) == samples(18)
    kill_storm.check_losses(tmp_path / "run")


@pytest.mark.parametrize(
    ("trained", "words"),
    [
        ({"0": ["1:q_0_0"]}, "1 of 4 samples were trained"),
        ({"0": [f"1:q_{n}" for n in range(3)] * 2}, "3 twice"),
        ({"5": [f"1:q_{n}" for n in range(4)]}, "4 in another step than their own"),
    ],
)
def test_it_finds_what_is_wrong(tmp_path: Path, trained: dict[str, list[str]], words: str) -> None:
    folder = tmp_path / "checkpoints" / "step_000001" / "planner"
    folder.mkdir(parents=True)
    (folder / "simulated_policy.json").write_text(json.dumps({"trained": trained}))
    with pytest.raises(kill_storm.StormError, match=words):
        kill_storm.check(tmp_path, 1)
