"""Processes that do not compute on the card take none of its memory: figures, doctor and dry runs.

Criteria: an object for the devices and its figures make no context; pinning makes one, on the own card alone; ``doctor
--json`` and ``train --dry-run`` leave nothing, and the plan of a dry run names the card.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Final

from .checks import Card, Check, at_most, holds, part
from .peers import Peer, Side, UsedMemory

_MOST_CONTEXT_BYTES: Final = 1_500_000_000
_COMMAND_S: Final = 60.0
_CPU_COMMAND_S: Final = 600.0  # other programs may use the cores
_PINNED_BYTES: Final = 64 << 20


def run(card: Card) -> Iterator[Check]:
    directory = card.in_folder("states").folder
    used = UsedMemory(card, directory)
    yield from part("devices", lambda: _make_devices(card, used))
    yield from part("doctor", lambda: _run_doctor(card, used))
    yield from part("dry run", lambda: _run_dry(card, used))


def _make_devices(card: Card, used: UsedMemory) -> Iterator[Check]:
    before = used.read()
    with Peer(card, card.folder / "states") as peer:
        steps = (
            ("CudaDevices()", make_devices, used.noise_bytes),
            ("figures of a transport", read_figures, used.noise_bytes),
            ("pinned memory", pin_memory, _MOST_CONTEXT_BYTES),
        )
        for name, step, bound in steps:
            peer.call(step)
            yield at_most(f"{name}: taken on the card", used.read() - before, bound, "bytes")
    remaining_bytes = used.wait_until(before + used.noise_bytes) - before
    yield at_most("after its end: taken on the card", remaining_bytes, used.noise_bytes, "bytes")


async def make_devices(side: Side) -> list[str]:
    """The devices that this process sees."""
    return side.devices.visible()


async def read_figures(side: Side) -> dict[str, float]:
    """The figures of a transport."""
    return dict((await side.transport()).statistics().numbers())


async def pin_memory(side: Side) -> None:
    """Reserves memory of the host, which is pinned."""
    await (await side.transport()).reserve(_PINNED_BYTES, states=1)


def _run_doctor(card: Card, used: UsedMemory) -> Iterator[Check]:
    answer = yield from _run_command(card, used, ["doctor", "--json"])
    gpus = json.loads(answer)["host"]["gpus"]
    yield holds(
        "doctor: cards", len(gpus), "at least one" if card.is_cuda else "any", bool(gpus) or not card.is_cuda
    )


def _run_dry(card: Card, used: UsedMemory) -> Iterator[Check]:
    setting = f"agent_defaults.model.device={card.device}"
    answer = yield from _run_command(card, used, ["train", "sort-digits", setting, "--dry-run"])
    plan = [line for line in answer.splitlines() if line.startswith("# ")]
    trainer = next((line for line in plan if line.startswith("# trainer")), "no line of the trainer")
    print("\n".join(plan))
    yield Check("dry run: the trainer's line", " ".join(trainer.split()))
    summary = next((line for line in plan if "GPU" in line and "actor" not in line), "no line of the host")
    name = _card_name(card)
    yield holds("dry run: the card", summary[:200], f"named: {name}", name in answer)


def _card_name(card: Card) -> str:
    if not card.is_cuda:
        return "GPU"
    import torch

    return torch.cuda.get_device_name(card.device).removeprefix("NVIDIA ").split()[0]


def _run_command(card: Card, used: UsedMemory, arguments: Sequence[str]) -> Generator[Check, None, str]:
    name = "doctor" if arguments[0] == "doctor" else "dry run"
    before = used.read()
    with MostUsed(used) as most:
        began = time.perf_counter()
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "flexmarl.launch.cli.main", *arguments],
            cwd=card.folder, env=os.environ, capture_output=True, text=True, check=False,
            timeout=(_COMMAND_S if card.is_cuda else _CPU_COMMAND_S) * card.limit_factor,
        )  # fmt: skip
        seconds = time.perf_counter() - began
    if ended.returncode:
        print(ended.stdout[-2000:], ended.stderr[-2000:])
    yield holds(f"{name}: exit status", ended.returncode, "0", ended.returncode == 0)
    yield Check(f"{name}: seconds", seconds, "s")
    yield Check(f"{name}: most taken on the card meanwhile", most.most - before, "bytes")
    remaining_bytes = used.wait_until(before + used.noise_bytes) - before
    yield at_most(f"{name}: left on the card", remaining_bytes, used.noise_bytes, "bytes")
    return ended.stdout


class MostUsed:
    """The most bytes of the card that were taken inside of the context, as often as the driver was asked."""

    def __init__(self, used: UsedMemory) -> None:
        self._used = used
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.most = used.read()

    def __enter__(self) -> "MostUsed":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.most = max(self.most, self._used.read())
