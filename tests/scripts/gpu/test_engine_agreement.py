"""T9 with a tiny model."""

import pytest
import torch

from scripts.gpu import engine_agreement
from scripts.gpu.checks import Card
from scripts.gpu.engine_agreement import CPU_LOAD, compare, run
from scripts.gpu.models import TINY


def test_engine_and_trainer_agree(card: Card) -> None:
    checks = {check.name: check for check in run(card)}
    assert checks["float32: mean of |ratio - 1|"].passed, checks
    for dtype in ("bfloat16", "float32"):
        assert checks[f"{dtype}: mean of |ratio - 1|"].criterion
        assert checks[f"{dtype}: tokens"].value == CPU_LOAD.rows * CPU_LOAD.completion
        assert all(checks[f"{dtype}, batch {size}: tokens/s decoded"].value for size in CPU_LOAD.batches)


def test_other_weights_are_seen(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    difference = engine_agreement._difference

    def differ(trainer: object, *rest: object) -> torch.Tensor:
        with torch.no_grad():
            trainer.model.base_model.norm.weight.mul_(1.001)  # type: ignore[attr-defined]
        return difference(trainer, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_agreement, "_difference", differ)
    assert [check.passed for check in compare(card, TINY, CPU_LOAD, "float32") if check.criterion] == [False]
