"""T1 on simulated devices."""

from scripts.gpu.checks import Card
from scripts.gpu.device_paths import run


def test_all_holds_on_simulated_devices(card: Card) -> None:
    checks = {check.name: check for check in run(card)}
    checks.pop("killed reader: three versions after")  # seconds
    assert [check for check in checks.values() if check.passed is False] == []
    for name in ("killed owner: a later read", "expandable segments: path", "left on the card at the end"):
        assert checks[name].passed
