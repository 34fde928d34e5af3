"""The pieces of the race against TRL that need no TRL, and flexmarl's side on its own."""

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from flexmarl.launch.config.config_reading import resolve
from scripts.bench import race_trl
from scripts.bench.commands import main

from . import warm_runs

WARM_UP = race_trl.WARM_UP_STEPS


def _side(
    *measured: float, tokens: int = 1024, grad_norm: float = 0.5, weight_change: float = 0.01
) -> race_trl.SideResult:
    steps = WARM_UP + len(measured)
    seconds = [9.0] * WARM_UP + list(measured)  # warm-up steps are slow, and must not be counted
    rewards = [0.2 + step / 100 for step in range(steps)]
    return race_trl.SideResult(seconds, [tokens] * steps, rewards, grad_norm, weight_change)


def test_summary_is_the_ratio_of_medians_over_all_rounds_without_warm_up() -> None:
    rounds = [
        race_trl.Round("trl", _side(0.2, 0.2, 0.4), _side(0.1, 0.1, 0.1)),
        race_trl.Round("flexmarl", _side(0.2, 0.4, 0.2), _side(0.1, 0.3, 0.1)),
    ]
    summary = race_trl.summary(rounds)
    assert summary["trl_s_per_step"] == 0.2
    assert summary["flexmarl_s_per_step"] == 0.1
    assert summary["ratio"] == 0.5
    assert [item["first"] for item in summary["rounds"]] == ["trl", "flexmarl"]
    assert [item["ratio"] for item in summary["rounds"]] == [0.5, 0.5]
    assert summary["training"]["trl"][0] == {
        "first_reward": 0.2,
        "last_reward": pytest.approx(0.27),
        "first_grad_norm": 0.5,
        "weight_change": 0.01,
    }
    assert summary["quiet"] == {"trl_s_per_step": 0.2, "flexmarl_s_per_step": 0.1, "ratio": 0.5}
    json.dumps(summary, allow_nan=False)


def test_a_side_that_did_the_work_is_accepted() -> None:
    race_trl.check_side("TRL", _side(0.1, 0.1), WARM_UP + 2, 1024)


@pytest.mark.parametrize(
    ("side", "steps", "words"),
    [
        (_side(0.1), 2, "1 of 2 steps|6 of 7 steps"),
        (_side(0.1, tokens=1023), 1, "1023.* tokens a step, not 1024"),
        (_side(0.1, grad_norm=0.0), 1, "did not train"),
        (_side(0.1, weight_change=0.0), 1, "did not train"),
        (_side(0.1, grad_norm=float("nan")), 1, "did not train"),
    ],
)
def test_a_side_that_did_not_do_the_work_is_refused(
    side: race_trl.SideResult, steps: int, words: str
) -> None:
    with pytest.raises(race_trl.RaceError, match=words):
        race_trl.check_side("TRL", side, WARM_UP + steps, 1024)


def test_weight_change_is_relative_to_the_weights_before(tmp_path: Path) -> None:
    before, after = tmp_path / "before.safetensors", tmp_path / "after.safetensors"
    save_file({"a": np.array([3.0], np.float32), "b": np.array([4.0], np.float32)}, before)
    save_file({"a": np.array([3.0], np.float32), "b": np.array([4.5], np.float32)}, after)
    assert race_trl.weight_change(before, before) == 0
    assert race_trl.weight_change(before, after) == pytest.approx(0.1)


def test_weight_change_refuses_other_tensors(tmp_path: Path) -> None:
    before, after = tmp_path / "before.safetensors", tmp_path / "after.safetensors"
    save_file({"a": np.zeros(1, np.float32)}, before)
    save_file({"b": np.zeros(1, np.float32)}, after)
    with pytest.raises(race_trl.RaceError, match=r"other tensors"):
        race_trl.weight_change(before, after)


def test_the_race_is_of_sixteen_completions_of_64_tokens_that_cannot_end_early() -> None:
    from transformers import AutoTokenizer

    config = resolve(str(race_trl.RECIPE), [])
    (policy,) = config.policies.values()
    model = policy.real_model
    tokenizer = AutoTokenizer.from_pretrained(model.tokenizer)
    assert race_trl.tokens_per_step(config) == 16 * 64
    assert model.config is not None
    assert min(tokenizer.eos_token_id, tokenizer.pad_token_id) >= model.config["vocab_size"]


def test_without_trl_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["race_trl", "--steps", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert 'pip install "flexmarl[bench]"' in err


def test_a_side_that_fails_is_named() -> None:
    with pytest.raises(race_trl.RaceError, match=r"TRL: .*exit status 3"):
        race_trl._run("TRL", [sys.executable, "-c", "raise SystemExit(3)"])


def test_flexmarl_runs_its_side_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(side: str, command: Sequence[str]) -> None:
        assert side == "flexmarl"
        warm_runs.run(command[command.index("train") :])

    monkeypatch.setattr(race_trl, "_run", run)
    model = tmp_path / "model"
    race_trl.make_model(model)
    result = race_trl.run_flexmarl(model, 2, tmp_path / "run")
    race_trl.check_side("flexmarl", result, 2, 16 * 64)
    assert all(seconds > 0 for seconds in result.seconds)
