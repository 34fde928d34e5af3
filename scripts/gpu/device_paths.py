"""Weights go from process to process in device memory, bit for bit, and a killed process leaves none of it behind.

With the product's own devices and transports: an owner, and readers that open its memory by handle (``cuda_ipc``).
Criteria: all bytes equal, handles opened once for all versions, no version held up by a killed reader, the driver's
figures as before after each end, and shared memory with the reason where the driver refuses a handle.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from flexmarl.transport.errors import TransportError
from flexmarl.transport.handle import CudaIpcSource, StateHandle

from .checks import Card, Check, at_most, holds, part
from .peers import Peer, Side, UsedMemory, pattern

if TYPE_CHECKING:
    from torch import Tensor

Sizes = dict[str, int]
# A byte, sizes that no page of the device fits, exactly one page, and more than one buffer.
TINY: Sizes = {"byte": 1, "odd": 1001}
MIXED: Sizes = {"byte": 1, "kB": 1000, "MB": 1_000_000, "page": 2 << 20, "odd": 3_000_001}
LARGE: Sizes = MIXED | {"embedding": 300_000_000, "layer": 200_000_000}
_VERSIONS = 20
_EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
_OPEN = "cudaIpcOpenMemHandle"


def run(card: Card) -> Iterator[Check]:
    directory = card.in_folder("states").folder
    used = UsedMemory(card, directory)
    at_start = used.read()
    large = LARGE if card.is_cuda else MIXED
    # All at once: a process needs seconds to import PyTorch.
    with (
        Peer(card, directory) as owner,
        Peer(card, directory) as reader,
        Peer(card, directory) as victim,
        Peer(card, directory) as other_owner,
        Peer(card, directory, refuses=[_OPEN]) as refused,
        # Without a card it would be as the first one.
        Peer(card, directory, environment=_EXPANDABLE) if card.is_cuda else nullcontext(owner) as expandable,
    ):
        parts: dict[str, Callable[[], Iterator[Check]]] = {
            "bytes": lambda: _compare_bytes(owner, reader, large),
            "versions": lambda: _publish_versions(owner, reader),
            "two at once": lambda: _use_two_at_once(owner, reader),
            "addresses": lambda: _use_addresses_again(owner, reader),
            "killed reader": lambda: _kill_reader(owner, reader, victim, used),
            "killed owner": lambda: _kill_owner(other_owner, reader, used, large),
            "expandable segments": lambda: _read_expandable(expandable, reader),
            "refused to the reader": lambda: _refuse_reader(owner, refused),
            "refused to all": lambda: _refuse_owner(refused, reader),
        }
        for name, checks in parts.items():
            yield from part(name, checks)
    peers = (owner, reader, refused, expandable)
    statuses = [peer.process.returncode for peer in peers]
    yield holds("orderly ends", str(statuses), "status 0", not any(statuses))
    remaining_bytes = used.wait_until(at_start + used.noise_bytes) - at_start
    yield at_most("left on the card at the end", remaining_bytes, used.noise_bytes, "bytes")


# ----------------------------------------------------------------------- in the other processes


async def publish(side: Side, key: str, sizes: Sizes, version: int) -> StateHandle:
    """Sets a state of these tensors, whose bytes follow from the version. All paths are offered."""
    if side.kept.get(key) != sizes:
        side.kept[key] = sizes
        side.kept[f"{key} tensors"] = {name: side.place(pattern(0, size)) for name, size in sizes.items()}
    tensors: dict[str, Tensor] = side.kept[f"{key} tensors"]
    for name, tensor in tensors.items():
        tensor.copy_(pattern(version + len(name), tensor.nbytes))
    return await (await side.transport()).set(key, tensors, version=version)


async def drop(side: Side, key: str) -> None:
    """Frees the memory of a key."""
    await (await side.transport()).drop(key)


async def read(side: Side, handle: StateHandle) -> tuple[list[str], str, str]:
    """The names of the tensors with other bytes than they should have, the path, and the reason against faster ones."""
    transport = await side.transport()
    into: dict[str, Tensor] = side.kept.setdefault(f"into {handle.key}", {})
    for spec in handle.tensors:
        nothing = pattern(-1, spec.size_bytes)
        if spec.name in into and into[spec.name].nbytes == spec.size_bytes:
            into[spec.name].copy_(nothing)
        else:
            into[spec.name] = side.place(nothing)
    await transport.get(handle, into=into)
    chosen = transport.chosen(handle.key)
    assert chosen is not None, "it was read just now"
    return _wrong(handle, into), chosen.path, "; ".join(chosen.refused.values())


async def map_both(side: Side, handles: tuple[StateHandle, StateHandle]) -> list[str]:
    """The names of wrong tensors of two states that are used in place at the same time."""
    transport = await side.transport()
    async with AsyncExitStack() as stack:
        mapped = [
            (handle, await stack.enter_async_context(transport.mapped(handle, checked=True)))
            for handle in handles
        ]
        return [f"{handle.version} {name}" for handle, tensors in mapped for name in _wrong(handle, tensors)]


async def hold_mapped(side: Side, handle: StateHandle) -> list[str]:
    """The names of wrong tensors; the state is used in place until this process ends."""
    transport = await side.transport()
    mapping = transport.mapped(handle)
    side.kept["mapping"] = mapping
    return _wrong(handle, await mapping.__aenter__())


async def try_read(side: Side, handle: StateHandle) -> str:
    """The error of a read, the names of wrong tensors, or the word equal."""
    try:
        return ", ".join((await read(side, handle))[0]) or "equal"
    except TransportError as error:
        return f"{type(error).__name__}: {error}"


def _wrong(handle: StateHandle, tensors: dict[str, Any]) -> list[str]:
    import torch

    wrong = []
    for spec in handle.tensors:
        expected = pattern(handle.version + len(spec.name), spec.size_bytes)
        if not torch.equal(tensors[spec.name].cpu(), expected):
            wrong.append(spec.name)
    return wrong


# ----------------------------------------------------------------------- the parts


def _none_wrong(name: str, wrong: list[str]) -> Check:
    return holds(name, ", ".join(wrong[:5]) or "equal", "all bytes equal", not wrong)


def _by_device(name: str, path: str, refused: str) -> Check:
    return holds(name, refused or path, "cuda_ipc", path == "cuda_ipc")


def _source(handle: StateHandle) -> CudaIpcSource:
    source = handle.source("cuda_ipc")
    if not isinstance(source, CudaIpcSource):
        raise AssertionError(f"not offered in device memory: {dict(handle.withheld)}")
    return source


def _compare_bytes(owner: Peer, reader: Peer, large: Sizes) -> Iterator[Check]:
    handle = owner.call(publish, "tiny", TINY, 1)
    offered = ", ".join(source.path for source in handle.sources)
    reason = "; ".join(handle.withheld.values())
    yield holds("offered", reason or offered, "cuda_ipc and shm", offered == "cuda_ipc, shm")
    for key, sizes in (("tiny", TINY), ("large", large)):
        began = time.perf_counter()
        handle = owner.call(publish, key, sizes, 2)
        wrong, path, refused = reader.call(read, handle)
        yield _by_device(f"{key}: path", path, refused)
        yield _none_wrong(f"{key}: bytes", wrong)
        yield Check(f"{key}: first exchange", time.perf_counter() - began, "s")
    yield Check("large: buffers", len(_source(handle).buffers))


def _publish_versions(owner: Peer, reader: Peer) -> Iterator[Check]:
    wrong: list[str] = []
    handles: set[str] = set()
    seconds = []
    for version in range(_VERSIONS):
        for key, sizes in (("tiny", TINY), ("mixed", MIXED)):
            began = time.perf_counter()
            handle = owner.call(publish, key, sizes, 10 + version)
            wrong += reader.call(read, handle)[0]
            seconds.append(time.perf_counter() - began)
            handles.update(part.handle for part in _source(handle).buffers)
    yield _none_wrong(f"{2 * _VERSIONS} versions: bytes", wrong)
    yield holds("handles of two keys", len(handles), "4, two for each key", len(handles) == 4)
    yield Check("median of a publish and a read", statistics.median(seconds) * 1000, "ms")


def _use_two_at_once(owner: Peer, reader: Peer) -> Iterator[Check]:
    first = owner.call(publish, "mixed", MIXED, 100)
    second = owner.call(publish, "mixed", MIXED, 101)
    yield _none_wrong("two versions open at once: bytes", reader.call(map_both, (first, second)))


def _use_addresses_again(owner: Peer, reader: Peer) -> Iterator[Check]:
    """The driver gives freed addresses to the next key, of another size."""
    wrong: list[str] = []
    paths = set()
    for number in range(8):
        key, sizes = f"short-{number}", (MIXED if number % 2 else TINY)
        for version in range(2):
            names, path, _ = reader.call(read, owner.call(publish, key, sizes, 200 + version))
            wrong += names
            paths.add(path)
        owner.call(drop, key)
    yield _none_wrong("memory that was freed and taken again: bytes", wrong)
    yield _by_device("memory that was freed and taken again: path", "/".join(sorted(paths)), "")


def _kill_reader(owner: Peer, reader: Peer, victim: Peer, used: UsedMemory) -> Iterator[Check]:
    handle = owner.call(publish, "mixed", MIXED, 300)
    reader.call(read, handle)
    without_victim = used.read()
    yield _none_wrong("killed reader: bytes before", victim.call(hold_mapped, handle))
    yield Check("killed reader: memory", used.read() - without_victim, "bytes")
    victim.kill()
    began = time.perf_counter()
    for version in range(301, 304):
        handle = owner.call(publish, "mixed", MIXED, version)
    yield at_most("killed reader: three versions after", time.perf_counter() - began, 10.0, "s")
    yield _none_wrong("killed reader: bytes after", reader.call(read, handle)[0])
    remaining_bytes = used.wait_until(without_victim + used.noise_bytes) - without_victim
    yield at_most("killed reader: left on the card", remaining_bytes, used.noise_bytes, "bytes")


def _kill_owner(owner: Peer, reader: Peer, used: UsedMemory, sizes: Sizes) -> Iterator[Check]:
    handle = owner.call(publish, "of the killed", sizes, 400)
    wrong, path, refused = reader.call(read, handle)
    yield _by_device("killed owner: path before", path, refused)
    yield _none_wrong("killed owner: bytes before", wrong)
    before = used.read()
    size_bytes = 2 * handle.size_bytes  # two sets of buffers
    owner.kill()
    remaining_bytes = used.wait_until(before - size_bytes)
    criterion = f">= {size_bytes / 1e6:.0f} MB, though a reader had it open"
    freed = f"{(before - remaining_bytes) / 1e6:.0f} MB"
    yield holds("killed owner: freed", freed, criterion, before - remaining_bytes >= size_bytes)
    later = reader.call(try_read, handle)
    is_right = later == "equal" or later.startswith("StaleHandle")
    yield holds("killed owner: a later read", later, "its bytes, or StaleHandle", is_right)


def _read_expandable(owner: Peer, reader: Peer) -> Iterator[Check]:
    for version in range(500, 503):
        wrong, path, refused = reader.call(read, owner.call(publish, "expandable", MIXED, version))
    yield _by_device("expandable segments: path", path, refused)
    yield _none_wrong("expandable segments: bytes", wrong)


def _refuse_reader(owner: Peer, reader: Peer) -> Iterator[Check]:
    for version in range(600, 602):
        wrong, path, refused = reader.call(read, owner.call(publish, "mixed", MIXED, version))
        yield _none_wrong(f"a reader that can't open it, version {version - 599}: bytes", wrong)
        is_named = path == "shm" and _OPEN in refused
        yield holds(
            "a reader that can't open it: reason", refused or path, f"shm, as {_OPEN} fails", is_named
        )


def _refuse_owner(owner: Peer, reader: Peer) -> Iterator[Check]:
    handle = owner.call(publish, "refused", MIXED, 700)
    wrong, path, refused = reader.call(read, handle)
    yield _none_wrong("memory that none can open: bytes", wrong)
    is_named = path == "shm" and _OPEN in refused
    yield holds("memory that none can open: reason", refused or path, f"shm, as {_OPEN} fails", is_named)
