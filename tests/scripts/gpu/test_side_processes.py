"""T2 on simulated devices: its measure of the memory, and the two commands."""

import time

from scripts.gpu.checks import Card
from scripts.gpu.peers import FAKE_BYTES, UsedMemory, make_devices
from scripts.gpu.side_processes import MostUsed, run

from ...patience import PATIENCE_S


def test_all_holds_on_simulated_devices(card: Card) -> None:
    checks = {check.name: check for check in run(card)}
    assert [check for check in checks.values() if check.passed is False] == []
    assert checks["doctor: exit status"].value == checks["dry run: exit status"].value == 0


def test_the_most_memory_is_seen_while_it_is_taken(card: Card) -> None:
    directory = card.in_folder("states").folder
    used, devices = UsedMemory(card, directory), make_devices(card.device, directory)
    with MostUsed(used) as most:
        buffer = devices.allocate(used.device, FAKE_BYTES // 2)
        deadline = time.monotonic() + PATIENCE_S
        while most.most < FAKE_BYTES // 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        devices.free(buffer)
    assert most.most == FAKE_BYTES // 2 and used.read() == 0
