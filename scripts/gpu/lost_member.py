"""A rank that waits for one that never comes ends with a sentence, within its deadline.

The waiting rank is a process of its own. At first no other one comes to the meeting. Then another rank has come, and is
lost before the process group is made: the waiting rank is aborted, and killed if it still waits five seconds later, as
the pool does it with a slot's worker: NCCL can't be interrupted while it connects. Criteria: an error that says so, or
the end of the process, and its memory on the card is free. Recorded: the end by NCCL's own deadline, without an abort.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

import torch

from flexmarl.actors.trainer.backends.torch_policy.gang_meeting import LOOPBACK, Meeting, Membership, c10d
from flexmarl.actors.trainer.pool.state_moves import TORN_TIMEOUT_S

from .checks import Card, Check, at_most, holds, part
from .peers import UsedMemory

_PROGRAM: Final = (
    "import sys; sys.path.append(sys.argv.pop(1)); from scripts.gpu.lost_member import main; main()"
)
_ROOT: Final = Path(__file__).parents[2]
_DEADLINE_S: Final = 4.0
_LATENESS_S: Final = 5.0
_LIMIT_S: Final = 18.0
_CPU_LIMIT_S: Final = 280.0  # other programs may use the cores
_ABORT_AGAIN_S: Final = 0.5
_ENDED: Final = 3
_NO_ABORT: Final = "never"


@dataclass(frozen=True, slots=True)
class Case:
    """``comes``: the other rank has come to the meeting. ``is_aborted``: the waiting one is, at the deadline."""

    name: str
    words: str
    comes: bool = False
    is_aborted: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    recorded_only: bool = False


CASES: Final = (
    Case("no other comes", "have not come"),
    Case("lost before the group", "", comes=True, is_aborted=True),
)
OF_NCCL: Final = (
    Case(
        "lost before the group, NCCL that does not block", "", comes=True, recorded_only=True,
        environment=(
            ("TORCH_NCCL_USE_COMM_NONBLOCKING", "1"), ("TORCH_NCCL_NONBLOCKING_TIMEOUT", f"{_DEADLINE_S:g}"),
        ),
    ),
)  # fmt: skip


def run(card: Card) -> Iterator[Check]:
    for case in (*CASES, *(OF_NCCL if card.is_cuda else ())):
        yield from part(case.name, partial(wait_for_member, card, case))


def wait_for_member(card: Card, case: Case) -> Iterator[Check]:
    """Starts the waiting rank, and checks its end."""
    limit_s = (_LIMIT_S if card.is_cuda else _CPU_LIMIT_S) * card.limit_factor
    used = UsedMemory(card, card.folder)
    at_start = used.read()
    meeting = Meeting(LOOPBACK)
    endpoint, _, gang = meeting.address.partition("/")
    host, _, port = endpoint.rpartition(":")
    store = c10d.TCPStore(
        host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=limit_s)
    )
    if case.comes:
        c10d.PrefixStore(gang, store).set("rank-1", "here")
    abort_s = f"{_DEADLINE_S:g}" if case.is_aborted else _NO_ABORT
    waiting = subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM, str(_ROOT), card.device, meeting.address, abort_s],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env={**os.environ, **dict(case.environment)},
    )  # fmt: skip
    assert waiting.stdout is not None
    try:
        waiting.stdout.readline()  # its imports are done
        began = time.monotonic()
        patience_s = _DEADLINE_S + TORN_TIMEOUT_S if case.is_aborted and card.is_cuda else limit_s
        try:
            text, _ = waiting.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            waiting.kill()
            waiting.communicate()
            if not (case.is_aborted and card.is_cuda):
                text = f"it still waits after {patience_s:g} s"
                yield _verdict(case, Check(case.name, text, "", "an end", False))
                return
            yield Check(
                f"{case.name}: end", f"killed {TORN_TIMEOUT_S:g} s after its abort, as the pool does it"
            )
            remaining_bytes = used.wait_until(at_start + used.noise_bytes) - at_start
            yield at_most(f"{case.name}: left on the card", remaining_bytes, used.noise_bytes, "bytes")
            return
    finally:
        meeting.close()
    seconds = time.monotonic() - began
    lines = text.splitlines()
    end: Mapping[str, str] = json.loads(lines[-1]) if lines else {}
    shown = f"exit status {waiting.returncode}: {end.get('error', 'no sentence')}"[:300]
    passed = waiting.returncode == _ENDED and case.words in end.get("error", "")
    yield _verdict(case, holds(f"{case.name}: end", shown, f"an error {case.words}".strip(), passed))
    if card.is_cuda:
        yield _verdict(case, at_most(f"{case.name}: seconds", seconds, _DEADLINE_S + _LATENESS_S))
    else:
        yield Check(f"{case.name}: seconds", seconds)


def _verdict(case: Case, check: Check) -> Check:
    return Check(check.name, check.value, check.unit) if case.recorded_only else check


# ----------------------------------------------------------------------- in the process that waits


def main() -> None:
    """Joins a gang of two as its first rank. Prints an error as JSON, and exits with 3 then, else with 0."""
    device, meeting, abort_s = sys.argv[1:]
    membership = Membership(0, 2, meeting, torch.device(device), _DEADLINE_S)
    if device != "cpu":
        torch.zeros(1, device=device)  # opens the device: not a part of the wait
    print("ready", flush=True)
    if abort_s != _NO_ABORT:
        threading.Thread(target=_abort, args=(membership, float(abort_s)), daemon=True).start()
    try:
        membership.join()
    except Exception as error:  # noqa: BLE001  # it is the result
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        sys.exit(_ENDED)


def _abort(membership: Membership, after_s: float) -> None:
    time.sleep(after_s)
    while True:
        membership.abort()
        time.sleep(_ABORT_AGAIN_S)
