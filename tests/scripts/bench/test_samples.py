"""``scripts/bench/run samples step``: the settings of the two runs of a pair."""

from collections.abc import Sequence

import pytest

from scripts.bench import samples
from scripts.bench.commands import main
from scripts.bench.paired_runs import Side


def test_the_cheaper_runs_have_the_setting_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def compare(pairs: int, steps: int, side: Side, other: Side) -> dict[str, Sequence[float]]:
        assert side == Side()
        asked.append((pairs, steps, other))
        return {}

    monkeypatch.setattr(samples, "paired_steps", compare)
    assert main(["samples", "step", "--pairs", "2", "--without", "samples.trainer_logprobs=0"]) == 0
    assert main(["samples", "step", "--than", "before"]) == 0
    assert asked == [(2, 120, Side(("samples.trainer_logprobs=0",))), (10, 120, Side(program="before"))]


def test_another_version_is_compared_with_the_same_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", "step", "--than", "before", "--without", "trace.enabled=false"]) == 2
    assert "leave out --without" in capsys.readouterr().err
