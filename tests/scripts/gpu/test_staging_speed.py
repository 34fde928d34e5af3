"""T4 on simulated devices."""

from scripts.gpu.checks import Card
from scripts.gpu.staging_speed import run


def test_all_rates_are_measured(card: Card) -> None:
    checks = {check.name: check for check in run(card)}
    assert [check for check in checks.values() if check.passed is False] == []
    beside = [name for name in checks if " beside digests, " in name or name.startswith("digests beside ")]
    assert len(beside) >= 2
    for name in (
        *beside,
        "to the host: state",
        "to the device: state",
        "products alone",
        "copies beside products",
    ):
        value = checks[name].value
        assert isinstance(value, float) and value > 0
