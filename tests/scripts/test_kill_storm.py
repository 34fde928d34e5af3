"""A short storm: actors of a real run are killed, and every sample is trained once all the same."""

import json
from pathlib import Path

import pytest

from .load import script

kill_storm = script("kill_storm")


def test_every_sample_is_trained_once_after_kills_of_any_actor(tmp_path: Path) -> None:
    storm = kill_storm.Storm(tmp_path, 20, kill_storm.drawn(3, seed=4), restarts=False, clock=False)
    lives = storm.blow()
    assert len([life for life in lives if life.struck]) >= 2 and lives[-1].status == 0
    assert kill_storm.check(tmp_path / "run", 20) == 20 * 4 * 2 * 9


def test_a_run_that_may_restart_ends_by_itself_also_after_stops_and_steps_of_the_clock(
    tmp_path: Path,
) -> None:
    strikes = kill_storm.drawn(2, seed=3, faults="mixed")
    assert {bool(strike.stopped_s) for strike in strikes} == {True, False}
    (life,) = kill_storm.Storm(tmp_path, 20, strikes, restarts=True, clock=True).blow()
    assert life.status == 0 and life.struck
    assert kill_storm.check(tmp_path / "run", 20) == 20 * 4 * 2 * 9


def test_a_run_whose_rollout_workers_are_struck_ends_by_itself(tmp_path: Path) -> None:
    strikes = kill_storm.drawn(4, seed=5, faults="mixed", actors=kill_storm.RESTARTED["rollout"])
    storm = kill_storm.Storm(tmp_path, 20, strikes, restarts=False, clock=False, several=["rollout"])
    (life,) = storm.blow()
    assert life.status == 0 and len(life.struck) == 4
    assert kill_storm.check(tmp_path / "run", 20) == 20 * 4 * 2 * 9
    kill_storm.check_losses(tmp_path / "run")


@pytest.mark.parametrize("kind", ["slots", "gangs"])
def test_a_run_whose_slot_workers_are_struck_ends_by_itself(tmp_path: Path, kind: str) -> None:
    strikes = kill_storm.drawn(4, seed=6, faults="mixed", actors=kill_storm.RESTARTED[kind])
    storm = kill_storm.Storm(tmp_path, 20, strikes, restarts=False, clock=False, several=[kind])
    (life,) = storm.blow()
    assert life.status == 0 and len(life.struck) == 4
    assert kill_storm.check(tmp_path / "run", 20) == 20 * 4 * 2 * 9
    kill_storm.check_losses(tmp_path / "run")


@pytest.mark.parametrize(
    ("trained", "words"),
    [
        ({"0": ["1:q_0_0"]}, "1 of 8 samples were trained"),
        ({"0": [f"1:q_{n}" for n in range(7)] * 2}, "7 twice"),
        ({"5": [f"1:q_{n}" for n in range(8)]}, "8 in another step than their own"),
    ],
)
def test_it_finds_what_is_wrong(tmp_path: Path, trained: dict[str, list[str]], words: str) -> None:
    folder = tmp_path / "checkpoints" / "step_000001" / "planner"
    folder.mkdir(parents=True)
    (folder / "simulated_policy.json").write_text(json.dumps({"trained": trained}))
    with pytest.raises(kill_storm.StormError, match=words):
        kill_storm.check(tmp_path, 1)
