"""T0 on this machine."""

from scripts.gpu.checks import Card
from scripts.gpu.machine import run


def test_the_machine_is_described(card: Card) -> None:
    checks = {check.name: check for check in run(card)}
    assert checks["torch"].passed and checks["transformers"].value
    assert checks["shared memory free"].unit == "bytes"
    assert "card 0" not in checks
