"""On a card that others have filled, an error says which actor or state lacks how many bytes, and how to help it.

Another process holds the card: first almost all of it, as a state is published; then as a policy computes; then as a
whole run starts.
"""

import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from flexmarl.transport.device_memory.buffer_sets import whole_pages

from .checks import Card, Check, holds, part
from .peers import Peer, Side, UsedMemory

if TYPE_CHECKING:
    from flexmarl.transport.device_memory.devices import Devices

_STATE_BYTES: Final = 4_000_000_000
_FREE_BYTES: Final = 1_500_000_000
_FREE_FOR_RUN_BYTES: Final = 300_000_000
_CPU_STATE_BYTES: Final = 100_000_000
_CPU_FREE_BYTES: Final = 50_000_000
_PIECES: Final = (1 << 30, 1 << 26, 1 << 23)
_RUN_S: Final = 45.0
_WORDS: Final = 480


def run(card: Card) -> Iterator[Check]:
    directory = card.in_folder("states").folder
    used = UsedMemory(card, directory)
    with Peer(card, directory) as holder, Peer(card, directory) as owner, Peer(card, directory) as trainer:
        yield from part("state", lambda: _publish(holder, owner, used, card))
        if card.is_cuda:
            yield from part("policy", lambda: _compute(holder, trainer))
            yield from part("run", lambda: _start_run(holder, card))


def _publish(holder: Peer, owner: Peer, used: UsedMemory, card: Card) -> Iterator[Check]:
    size_bytes = _STATE_BYTES if card.is_cuda else _CPU_STATE_BYTES
    owner.call(prepare_state, size_bytes)
    free = holder.call(hold, _FREE_BYTES if card.is_cuda else _CPU_FREE_BYTES)
    yield Check("state: free bytes left", free, "bytes")
    error = owner.call(publish)
    print(error)
    yield Check("state: error", error[:_WORDS])
    total = 2 * whole_pages(size_bytes)  # two versions
    named = {
        "state": "state solver",
        "bytes": f"{total} bytes",
        "card": used.device,
        "way out": "weights.path=shm",
    }
    for what, words in named.items():
        yield holds(f"state: its error names the {what}", words, "in the text", words in error)
    holder.call(release)
    error = owner.call(publish)
    yield holds("state: published when there is room", error or "yes", "without an error", not error)
    owner.end()


def _compute(holder: Peer, trainer: Peer) -> Iterator[Check]:
    trainer.call(prepare_policy)
    yield Check("policy: free bytes left", holder.call(hold, _FREE_BYTES), "bytes")
    error = trainer.call(compute)
    print(error)
    yield Check("policy: error", error[:_WORDS])
    yield holds("policy: its error says bytes", "GiB", "in the text", "GiB" in error or "bytes" in error)
    setting = "tokens_per_forward"
    yield holds("policy: its error has a way out", setting, "in the text", setting in error)
    holder.call(release)
    error = trainer.call(compute)
    yield holds(
        "policy: it computes when there is room", error[:_WORDS] or "yes", "without an error", not error
    )
    trainer.end()


def _start_run(holder: Peer, card: Card) -> Iterator[Check]:
    yield Check("run: free bytes left", holder.call(hold, _FREE_FOR_RUN_BYTES), "bytes")
    command = [
        sys.executable, "-P", "-m", "flexmarl.launch.cli.main", "train", "sort-digits", "--name", "crowded",
        "--runs", str(card.folder / "runs"), f"agent_defaults.model.device={card.device}", "training.steps=1",
    ]  # fmt: skip
    limit_s = _RUN_S * card.limit_factor
    try:
        ended = subprocess.run(
            command, cwd=card.folder, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        print(error.stdout, error.stderr)
        yield holds("run: ends", f"not within {limit_s:g} s", "an error at its start", False)
        return
    print(ended.stdout[-3000:], ended.stderr[-6000:])
    text = " ".join(ended.stderr.split())
    yield holds("run: exit status", ended.returncode, "2", ended.returncode == 2)
    yield Check("run: error", text[-_WORDS:])
    for what, words in {
        "the card": "GPU-",
        "its user": "is used by process",
        "the way out": "share_gpus",
    }.items():
        yield holds(f"run: its error names {what}", words, "in the text", words in text)
    holder.call(release)


# ----------------------------------------------------------------------- in the other processes


async def hold(side: Side, left_bytes: int) -> int:
    """Takes memory of the card until no more than ``left_bytes`` and a little are free; returns what is free."""
    devices: Devices[Any] = side.devices
    device = devices.visible()[0]
    held = side.kept.setdefault("held", [])
    for piece in _PIECES:
        while (free := devices.memory(device).free_bytes) - left_bytes > piece:
            held.append(devices.allocate(device, piece))
    return free


async def release(side: Side) -> None:
    """Gives it back."""
    for buffer in side.kept.pop("held", []):
        side.devices.free(buffer)


async def prepare_state(side: Side, size_bytes: int) -> None:
    """A state on the card, and a transport that has published before."""
    import torch

    if side.device == "cpu":
        tensor = side.place(torch.ones(size_bytes // 4))
    else:
        tensor = torch.ones(size_bytes // 4, device=side.device)
    side.kept["state"] = {"w": tensor}
    await (await side.transport()).set("small", {"w": torch.ones(2)}, version=0, offer=["cuda_ipc"])


async def publish(side: Side) -> str:
    """The error of a publish, or an empty text."""
    transport = await side.transport()
    return await _error_of(transport.set("solver", side.kept["state"], version=0, offer=["cuda_ipc"]))


async def prepare_policy(side: Side) -> None:
    """A policy on the card that has computed with a few tokens."""
    from flexmarl.actors.names import PolicyName
    from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy

    from .models import HALF_BILLION, make_samples, setup_of

    shape = HALF_BILLION.with_layers(6)
    setup = setup_of(shape, side.device, "bfloat16")
    # Not compiled: that takes longer than all else here.
    trainer = setup.torch_trainer.model_copy(update={"compilation": False})
    setup = setup.model_copy(update={"trainer": trainer})
    policy = TorchPolicy(PolicyName("solver"), setup, seed=0, total_steps=10)
    side.kept["policy"] = policy
    policy.accumulate(make_samples(2, 8, 8, shape.vocabulary))
    side.kept["samples"] = make_samples(32, 256, 768, shape.vocabulary)


async def compute(side: Side) -> str:
    """The error of a micro-batch of 16,384 tokens a forward, or an empty text."""

    async def accumulate() -> None:
        side.kept["policy"].accumulate(side.kept["samples"])

    return await _error_of(accumulate())


async def _error_of(work: Any) -> str:
    try:
        await work
    except Exception as error:  # noqa: BLE001  # its text is the result
        return f"{type(error).__name__}: {error}"
    return ""
