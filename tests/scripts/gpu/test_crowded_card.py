"""T12 on simulated devices: the part of a state."""

from scripts.gpu.checks import Card
from scripts.gpu.crowded_card import run


def test_a_state_that_does_not_fit_is_named_with_a_way_out(card: Card) -> None:
    checks = {check.name: check for check in run(card)}
    assert [check for check in checks.values() if check.passed is False] == []
    assert checks["state: its error names the bytes"].passed
