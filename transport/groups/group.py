"""A group of processes that transfer tensors together: torch's process group, used for planned sends alone.

The group has its own store and its own connections; it is not torch's default group, which a trainer makes and destroys
as it likes. Between processes of one host the store is a file in the run's directory, which other users can't enter,
and the connections are on the loopback interface.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore

from ..errors import CorruptState, MemberMissing, TransportClosed
from ..handle import TensorSpec
from ..tensors.torch_tensors import TORCH_DTYPES, checksum
from .plan import Plan, RowRange, Step

_DIGEST_BYTES: Final = 8
# Of a tag, which has 31 bits: 16 for the step.
_STEPS: Final = 1 << 16
_TRANSFERS: Final = 1 << 15
_ALIGNMENT: Final = 16  # of each range of rows in a buffer
_POLL_S: Final = 0.005
_CLOSED: Final = "closed"


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Plain data, the same for all members. ``name``: never used before in this run, a plain file name.

    ``backend``: "gloo" for tensors on CPUs, "nccl" for those on NVIDIA's devices.
    """

    name: str
    members: tuple[str, ...]
    backend: Literal["gloo", "nccl"] = "gloo"

    def __post_init__(self) -> None:
        if not self.name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"invalid group name {self.name!r}: needs letters, digits, - and _")
        if len(set(self.members)) != len(self.members) or len(self.members) < 2:
            raise ValueError(f"group {self.name}: needs two different members or more")


@dataclass(frozen=True, slots=True)
class PlanRun:
    """One run of a plan. ``number``: the same for all members, of no other run of the group at this time."""

    number: int
    key: str
    version: int
    plan: Plan
    specs: Mapping[str, TensorSpec]


class Group:
    """One member's part. Its calls block: they are for threads."""

    def __init__(self, address: GroupAddress, member: str, directory: Path) -> None:
        """Raises ValueError if ``member`` is not one of the group."""
        if member not in address.members:
            raise ValueError(f"group {address.name} has no member {member} ({', '.join(address.members)})")
        self.address = address
        self.member = member
        self._path = directory / f"{address.name}.group"
        self._ranks = {name: rank for rank, name in enumerate(address.members)}
        # A file, not a TCPStore: nothing listens, and a member that is killed takes no store with it.
        self._store = FileStore(str(self._path), len(address.members))
        self._group: Any = None
        self._buffers: dict[torch.device, Tensor] = {}
        self._lock = threading.Lock()
        self._broken = ""

    # ----------------------------------------------------------------------- the group's store

    def set(self, word: str, value: str = "") -> None:
        """Sets a key of the group's store, for the other members."""
        self._store.set(word, value)

    def get(self, word: str) -> str | None:
        """The value of a key of the group's store, or None if no member has set it."""
        return self._store.get(word).decode() if self._store.check([word]) else None

    def wait_for_all(self, word: str, stop: threading.Event, timeout_s: float) -> dict[str, str]:
        """Waits until every member has set ``word/<member>``; returns the values by member.

        Raises MemberMissing, with the names of those that have not; TransportClosed soon after ``stop`` is set.
        """
        values: dict[str, str] = {}
        deadline = time.monotonic() + timeout_s
        while True:
            for member in self.address.members:
                if member not in values and (value := self.get(f"{word}/{member}")) is not None:
                    values[member] = value
            missing = [member for member in self.address.members if member not in values]
            if not missing:
                return values
            if stop.wait(_POLL_S):
                raise TransportClosed
            if time.monotonic() > deadline:
                raise MemberMissing(self.address.name, missing, f"{word}: they have not joined", timeout_s)

    def connect(self, stop: threading.Event, timeout_s: float) -> None:
        """Connects all members, the first time. Raises MemberMissing."""
        with self._lock:
            if self._broken:
                raise MemberMissing(self.address.name, [], self._broken, timeout_s)
            if self._group is not None:
                return
            self.set(f"connect/{self.member}")
            self.wait_for_all("connect", stop, timeout_s)
            try:
                self._group = self._create_group(timeout_s)
            except RuntimeError as error:
                raise MemberMissing(self.address.name, [], f"connect: {error}", timeout_s) from error

    def _create_group(self, timeout_s: float) -> Any:
        rank, size = self._ranks[self.member], len(self._ranks)
        store = PrefixStore("connections", self._store)
        if self.address.backend == "nccl":
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timedelta(seconds=timeout_s)
            return nccl(store, rank, size, options)
        # Without a name of its own, gloo asks the resolver for this machine's address, which need not be its loopback.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=timeout_s)
        return gloo(store, rank, size, options)

    # ----------------------------------------------------------------------- planned sends

    def number_of_transfer(self) -> int:
        """A number that no other transfer of the group has."""
        return int(self._store.add("transfers", 1))

    def run(
        self,
        plan_run: PlanRun,
        held: Mapping[str, tuple[int, Tensor]],
        into: Mapping[str, tuple[int, Tensor]],
        stop: threading.Event,
        timeout_s: float,
        reached: Callable[[Step], None] = lambda step: None,
    ) -> None:
        """Does this member's steps. ``held`` and ``into``: rows of tensors by name, with the number of the first row.

        Several transfers may run at the same time; with "nccl" all members run them one after the other, in the same
        order. Raises MemberMissing, with the step and its peer, after which the group can't be used any more and
        ``into`` is undefined; CorruptState, TransportClosed.
        """
        plan = plan_run.plan
        for row_range in plan.local_rows.get(self.member, ()):
            _write(_rows(into, row_range), _rows(held, row_range))
        deadline = time.monotonic() + timeout_s
        for step in plan.steps:
            if stop.is_set():
                raise TransportClosed
            if not step.joins(self.member):
                continue
            reached(step)
            peers = step.receivers if step.sender == self.member else (step.sender,)
            if self._broken or self._group is None:
                raise MemberMissing(self.address.name, peers, self._broken or "not connected", timeout_s)
            try:
                self._do(plan_run, step, held, into, deadline - time.monotonic())
            except RuntimeError as error:  # torch's: a deadline, or a connection that was closed
                reason = f"step {step.number} of {len(plan.steps)}: {_first_line(error)}"
                self._broken = self._broken or reason
                raise MemberMissing(self.address.name, peers, reason, timeout_s) from error

    def _do(
        self,
        plan_run: PlanRun,
        step: Step,
        held: Mapping[str, tuple[int, Tensor]],
        into: Mapping[str, tuple[int, Tensor]],
        left_s: float,
    ) -> None:
        limit = timedelta(seconds=max(left_s, 1e-3))
        sends = step.sender == self.member
        specs = plan_run.specs
        size_bytes = sum(_align(_cut(row_range, specs).size_bytes) for row_range in step.row_ranges)
        # Through a buffer, with the digest behind the rows: one send for all of them, where each row range and the
        # digest would be a send of its own.
        with self._lent_buffer(size_bytes + _DIGEST_BYTES, _device(held if sends else into, step)) as flat:
            content, digest = flat[:size_bytes], flat[size_bytes:]
            tag = plan_run.number % _TRANSFERS * _STEPS + step.number % _STEPS
            if sends:
                for row_range, part in _parts(content, step, specs):
                    _write(part, _rows(held, row_range))
                digest.copy_(_digest(content))
                # Not a broadcast of the library: all members of the group would have to join it, also those that want
                # none of these rows.
                _wait([self._begin("send", flat, peer, tag) for peer in step.receivers], limit)
                return
            _wait([self._begin("recv", flat, step.sender, tag)], limit)
            actual = _digest(content)
            if not torch.equal(digest, actual):
                raise CorruptState(plan_run.key, plan_run.version, _number(digest), _number(actual))
            for row_range, part in _parts(content, step, specs):
                _write(_rows(into, row_range), part)

    def _begin(self, call: str, flat: Tensor, peer: str, tag: int) -> Any:
        # No local variable: an error that is kept would keep the connections open.
        if self._group is None:
            raise RuntimeError(_CLOSED)
        return getattr(self._group, call)([flat], self._ranks[peer], tag)

    @contextmanager
    def _lent_buffer(self, size_bytes: int, device: torch.device) -> Iterator[Tensor]:
        """Memory for one step: kept for the next one, and made again for a larger one."""
        kept = self._buffers.pop(device, None)  # another transfer that runs now makes its own
        if kept is None or kept.numel() < size_bytes:
            kept = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        yield kept[:size_bytes]
        self._buffers[device] = kept

    def close(self) -> None:
        """Ends the connections; members in the middle of a step see it. May be called again."""
        if self._broken != _CLOSED:
            self._broken = _CLOSED
            if self._group is not None:
                self._group.abort()
            self._group = None  # the connections are closed with the last reference

    def remove(self) -> None:
        """Removes the group's file; for its first member, when it leaves."""
        self._path.unlink(missing_ok=True)


def _wait(works: list[Any], limit: timedelta) -> None:
    """Waits for all ``works``, and keeps none: each would keep the connections open."""
    try:
        while works:
            works[-1].wait(limit)
            works.pop()
    finally:
        works.clear()


def _rows(tensors: Mapping[str, tuple[int, Tensor]], row_range: RowRange) -> Tensor:
    first, tensor = tensors[row_range.tensor]
    return tensor if not tensor.ndim else tensor[row_range.start - first : row_range.stop - first]


def _parts(flat: Tensor, step: Step, specs: Mapping[str, TensorSpec]) -> list[tuple[RowRange, Tensor]]:
    """The rows of a step as views of its buffer."""
    parts, start = [], 0
    for row_range in step.row_ranges:
        spec = _cut(row_range, specs)
        part = flat[start : start + spec.size_bytes]
        parts.append((row_range, part.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)))
        start += _align(spec.size_bytes)
    return parts


def _cut(row_range: RowRange, specs: Mapping[str, TensorSpec]) -> TensorSpec:
    spec = specs[row_range.tensor]
    return spec.rows(row_range.start, row_range.stop) if spec.shape else spec


def _align(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def _write(target: Tensor, source: Tensor) -> None:
    with torch.inference_mode():
        target.copy_(source)


def _device(tensors: Mapping[str, tuple[int, Tensor]], step: Step) -> torch.device:
    return tensors[step.row_ranges[0].tensor][1].device


def _digest(flat: Tensor) -> Tensor:
    """The xxh3_64 of host memory; of device memory a checksum, computed there."""
    number = xxhash.xxh3_64_intdigest(flat.numpy().data) if flat.is_cpu else checksum(flat)
    return torch.tensor(list(number.to_bytes(_DIGEST_BYTES, "little")), dtype=torch.uint8, device=flat.device)


def _number(digest: Tensor) -> int:
    return int.from_bytes(bytes(digest.tolist()), "little")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
