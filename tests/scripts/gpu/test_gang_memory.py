"""T7 with a tiny model, over gloo."""

from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from flexmarl.actors.trainer.backends.torch_policy.torch_factory import TorchFactory
from scripts.gpu.checks import Card
from scripts.gpu.gang_memory import gang_of_one, run, suspend_and_resume
from scripts.gpu.models import TINY


def test_a_policy_comes_and_goes(card: Card) -> None:
    checks = {check.name: check for check in run(card)}
    assert not [check for check in checks.values() if check.passed is False]
    assert (
        checks["state after five moves"].passed
        and checks["resumed: growth of memory in four moves"].value == 0
    )
    assert not distributed.is_initialized()


def test_one_rank_has_a_process_group(card: Card) -> None:
    with gang_of_one(card) as gang:
        assert distributed.get_world_size() == 1
        assert float(gang.sum(torch.ones(1))) == 1.0
        linear = torch.nn.Sequential(torch.nn.Linear(2, 2))
        gang.shard(linear, keep_root=True, bfloat16=False)
        assert all(isinstance(parameter, DTensor) for parameter in linear.parameters())


def test_memory_that_is_left_behind_is_seen(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(TorchFactory, "release", lambda _self, backend: kept.append(backend))
    failed = {check.name for check in suspend_and_resume(card, TINY) if check.passed is False}
    assert failed == {f"{state}: growth of memory in four moves" for state in ("suspended", "resumed")}
