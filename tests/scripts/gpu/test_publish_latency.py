"""T3 on simulated devices, whose computations are done only when someone waits for them."""

from scripts.gpu.checks import Card
from scripts.gpu.publish_latency import run


def test_a_publish_waits_for_no_computation_and_uses_the_cache(card: Card) -> None:
    checks = {check.name: check for check in run(card)}
    assert [check for check in checks.values() if check.passed is False] == []
    assert checks["0.004 GB: the card was computing at its end"].passed
    assert checks["full cache: published by"].passed
