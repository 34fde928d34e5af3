"""A short storm: actors of a real run are killed, and every sample is trained once all the same."""

import json
from pathlib import Path

import pytest

from .load import script

kill_storm = script("kill_storm")


def test_every_sample_is_trained_once_after_kills_of_any_actor(tmp_path: Path) -> None:
    lives = kill_storm.storm(tmp_path, kills=3, steps=20, seed=4)
    assert len([life for life in lives if life.killed]) >= 2 and lives[-1].status == 0
    assert kill_storm.check(tmp_path / "run", 20) == 20 * 4 * 2 * 9


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
