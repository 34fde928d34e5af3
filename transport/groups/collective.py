"""By a transfer that all members of a group join: a planned broadcast of one state.

The sender keeps a copy of each state that it offers. A transfer begins when every other member has asked for the state,
each for its own part; all compute the same plan (``plan.py``) and do its steps. A member that does not come, or leaves,
ends the transfer for all with an error that names it.
"""

import asyncio
import functools
import itertools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import xxhash

from ...core.telemetry import get_logger
from .. import payload
from ..errors import MemberMissing, StaleHandle, StateMismatch, TransportClosed
from ..handle import CollectiveSource, PathName, Rows, StateHandle, TensorSpec
from ..tensors.tensor_kind import Tensors
from ..transfers import INLINE_BYTES, CopyWorkers, Offer, ReadRequest, TransferPath
from .plan import Plan, Shards, make_plan, whole

if TYPE_CHECKING:
    from torch import Tensor

    from ..device_memory.devices import DeviceEvent
    from .group import Group, GroupAddress, PlanRun

R = TypeVar("R")
_POLL_S: Final = 0.01
_MOST_AT_ONCE: Final = 64
log = get_logger(__name__)


@dataclass(slots=True)
class _Entry:
    """One offered state. ``task``: serves the members that ask for it."""

    group: "Group"
    key: str
    version: int
    generation: int
    layout: payload.Layout
    tensors: "dict[str, Tensor]"
    task: asyncio.Task[None] | None = field(default=None)

    def word(self, *parts: object) -> str:
        return _word(self.group.member, self.generation, *parts)


class CollectivePath(TransferPath[CollectiveSource]):
    """``join_s``: the longest wait for all members to join a transfer, and for the transfer itself."""

    def __init__(self, directory: Path, join_s: float = 30.0) -> None:
        self._directory = directory
        # Threads of its own: each waits for other processes, and must not wait for another one's turn.
        self._workers = CopyWorkers(_MOST_AT_ONCE)
        self._join_s = join_s
        self._groups: dict[str, Group] = {}
        self._entries: dict[str, list[_Entry]] = {}
        self._generations = itertools.count(1)
        self._rounds: dict[tuple[str, str, int], int] = {}
        self._exchanges: dict[str, int] = {}
        self._closed = False

    @property
    def groups(self) -> frozenset[str]:
        """The names of the groups that this process has joined."""
        return frozenset(self._groups)

    async def join(self, address: "GroupAddress", member: str) -> None:
        """Raises ValueError if it has joined a group of that name, MemberMissing if another member does not come."""
        from .group import Group

        if address.name in self._groups:
            raise ValueError(f"group {address.name}: joined already")
        group = Group(address, member, self._directory)
        await self._in_thread(lambda stop: group.connect(stop, self._join_s))
        self._groups[address.name] = group

    async def leave(self, name: str) -> None:
        """Ends the membership; does nothing without one."""
        group = self._groups.pop(name, None)
        if group is None:
            return
        for key in [key for key, entries in self._entries.items() if entries[-1].group is group]:
            await self.drop(key)
        group.close()
        if group.member == group.address.members[0]:
            group.remove()

    async def _in_thread(self, work: Callable[[threading.Event], R]) -> R:
        return await self._workers.run(INLINE_BYTES + 1, work)

    # ----------------------------------------------------------------------- sending

    async def offer(
        self,
        key: str,
        tensors: Tensors,
        *,
        version: int,
        paths: Sequence[PathName] = ("collective",),
        after: "DeviceEvent | None" = None,
    ) -> Offer:
        if self._closed:
            raise TransportClosed
        if len(self._groups) != 1:
            raise ValueError(
                f"{key}: a state is offered to one group; joined: {', '.join(self._groups) or 'none'}"
            )
        (group,) = self._groups.values()
        layout = payload.Layout.of(tensors)
        copies = await self._in_thread(functools.partial(_copies, layout, list(tensors.values())))
        entry = _Entry(group, key, version, next(self._generations), layout, copies)
        group.set(entry.word("round"), "0")
        entries = self._entries.setdefault(key, [])
        entries.append(entry)
        entry.task = asyncio.create_task(self._serve(entry))
        await self._end(entries[:-2], version)
        del entries[:-2]
        source = CollectiveSource("collective", group.address.name, group.member, entry.generation)
        return Offer((source,), layout.specs, layout.size_bytes, None)

    async def _serve(self, entry: _Entry) -> None:
        group, specs = entry.group, entry.layout.specs
        held = {name: (0, tensor) for name, tensor in entry.tensors.items()}
        for number in itertools.count():
            group.set(entry.word("round"), str(number))
            requests = await self._gather_requests(entry, number)
            if requests is None:
                continue
            transfer_number = group.number_of_transfer()
            group.set(entry.word(number, "start"), json.dumps(transfer_number))
            plan = _plan(entry.key, specs, group.member, requests)
            plan_run = _plan_run(transfer_number, entry.key, entry.version, plan, specs)
            try:
                await self._run(group, plan_run, held, {})
            except (MemberMissing, TransportClosed) as error:
                # The other members get an error too, and the group is at its end.
                log.warning("state not transferred", key=entry.key, version=entry.version, reason=str(error))
                return

    async def _gather_requests(self, entry: _Entry, number: int) -> dict[str, Rows] | None:
        """The rows that each other member has asked for; None if a member did not ask in time after the first."""
        group = entry.group
        receivers = [member for member in group.address.members if member != group.member]
        requests: dict[str, Rows] = {}
        first: float | None = None
        while len(requests) < len(receivers):
            for member in receivers:
                if member not in requests and (value := group.get(entry.word(number, member))) is not None:
                    requests[member] = _rows_from(value)
            now = asyncio.get_running_loop().time()
            first = now if requests and first is None else first
            if first is not None and now - first > self._join_s and len(requests) < len(receivers):
                missing = [member for member in receivers if member not in requests]
                group.set(entry.word(number, "start"), json.dumps(missing))
                return None
            await asyncio.sleep(_POLL_S)
        return requests

    async def _end(self, entries: Sequence[_Entry], newest: int | None) -> None:
        for entry in entries:
            entry.group.set(entry.word("stale"), json.dumps(newest))
            if entry.task is not None:
                entry.task.cancel()
                await asyncio.wait([entry.task])

    async def drop(self, key: str) -> None:
        await self._end(self._entries.pop(key, []), None)

    # ----------------------------------------------------------------------- receiving

    async def fetch(
        self, request: ReadRequest[CollectiveSource], into: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        handle, source = request.handle, request.source
        if self._closed:
            raise TransportClosed
        _, targets = payload.destinations(handle.key, request.tensors, into)
        tensors = {
            spec.name: payload.torch_kind().adopt(target)
            for spec, target in zip(request.tensors, targets, strict=True)
        }
        group = self._groups[source.group]
        rows = _rows_of(request)
        number, requests = await self._join_transfer(group, handle, source, rows)
        plan = _plan(handle.key, handle.tensors, source.sender, requests)
        received = {name: (rows[name][0], tensor) for name, tensor in tensors.items()}
        plan_run = _plan_run(number, handle.key, handle.version, plan, handle.tensors)
        await self._run(group, plan_run, {}, received)
        return {spec.name: target for spec, target in zip(request.tensors, targets, strict=True)}

    async def _join_transfer(
        self, group: "Group", handle: StateHandle, source: CollectiveSource, rows: Rows
    ) -> tuple[int, dict[str, Rows]]:
        """Asks for ``rows``; returns the transfer's number and what each member has asked for, when all have."""
        word = functools.partial(_word, source.sender, source.generation)
        round_key = (source.group, source.sender, source.generation)
        number = self._rounds.get(round_key, -1)
        limit = 2 * self._join_s
        try:
            async with asyncio.timeout(limit):
                # The round after the last one that this member has joined, and that has ended.
                current = int(await _wait_word(lambda: _read_word(group, handle, word, "round"), number))
                self._rounds[round_key] = number = current
                group.set(word(number, group.member), json.dumps(rows))
                start = await _wait_word(lambda: _read_word(group, handle, word, number, "start"))
        except TimeoutError as expired:
            raise MemberMissing(
                group.address.name, [source.sender], f"state {handle.key}", limit
            ) from expired
        begun: int | list[str] = json.loads(start)
        if isinstance(begun, list):
            raise MemberMissing(group.address.name, begun, f"state {handle.key}", self._join_s)
        receivers = [member for member in group.address.members if member != source.sender]
        return begun, {member: _rows_from(group.get(word(number, member)) or "{}") for member in receivers}

    async def _run(
        self,
        group: "Group",
        plan_run: "PlanRun",
        held: "Mapping[str, tuple[int, Tensor]]",
        into: "Mapping[str, tuple[int, Tensor]]",
    ) -> None:
        await self._in_thread(lambda stop: group.run(plan_run, held, into, stop, self._join_s))

    # ----------------------------------------------------------------------- shards

    async def exchange(
        self,
        name: str,
        key: str,
        specs: Sequence[TensorSpec],
        held: Shards,
        needed: Shards,
        mine: "Mapping[str, Tensor]",
        into: "Mapping[str, Tensor]",
    ) -> None:
        """See ``StateTransport.exchange``."""
        group = self._groups.get(name)
        if group is None:
            raise ValueError(f"{key}: this process has not joined group {name}")
        plan = make_plan(key, specs, held, needed)
        number = self._exchanges[name] = self._exchanges.get(name, 0) + 1
        word = f"exchange/{number}"
        if group.member == group.address.members[0]:
            group.set(f"{word}/number", str(group.number_of_transfer()))
        group.set(f"{word}/{group.member}", xxhash.xxh3_64_hexdigest(repr((key, plan.steps)).encode()))
        digests = await self._in_thread(lambda stop: group.wait_for_all(word, stop, self._join_s))
        conflicts = sorted(member for member, digest in digests.items() if digest != digests[group.member])
        if conflicts:
            raise StateMismatch(key, [f"{member} has computed another plan" for member in conflicts])
        plan_run = _plan_run(int(group.get(f"{word}/number") or 0), key, 0, plan, specs)
        rows_held, rows_wanted = held.get(group.member, {}), needed.get(group.member, {})
        having = {name: (rows_held[name][0], tensor) for name, tensor in mine.items()}
        getting = {name: (rows_wanted[name][0], tensor) for name, tensor in into.items()}
        await self._run(group, plan_run, having, getting)

    async def close(self) -> None:
        self._closed = True
        for key in list(self._entries):
            await self.drop(key)
        for name in list(self._groups):
            await self.leave(name)
        await self._workers.close()


def _word(sender: str, generation: int, *parts: object) -> str:
    return "/".join(map(str, ("transfer", sender, generation, *parts)))


def _read_word(group: "Group", handle: StateHandle, word: Callable[..., str], *parts: object) -> str | None:
    """A word about a transfer. Raises StaleHandle if the sender offers it no more, or has never done."""
    if (newest := group.get(word("stale"))) is not None:
        raise StaleHandle(handle.key, handle.version, json.loads(newest))
    if group.get(word("round")) is None:
        raise StaleHandle(handle.key, handle.version, None)
    return group.get(word(*parts))


async def _wait_word(listen: Callable[[], str | None], after: int | None = None) -> str:
    """Waits for a word; with ``after``, for a number above it."""
    # The store is a file, and sets no event.
    while (word := listen()) is None or (after is not None and int(word) <= after):  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    return word


def _copies(layout: payload.Layout, tensors: Sequence[Any], stop: threading.Event) -> "dict[str, Tensor]":
    # Copies: the members ask when they are ready, and the sender's own tensors may have changed by then.
    sources = [payload.torch_kind().adopt(tensor).detach() for tensor in tensors]
    return {spec.name: tensor.clone() for spec, tensor in zip(layout.specs, sources, strict=True)}


def _rows_of(request: ReadRequest[CollectiveSource]) -> dict[str, tuple[int, int]]:
    """The rows of each tensor that is wanted, by name."""
    specs = {spec.name: spec for spec in request.handle.tensors}
    rows = {}
    for part in request.tensors:
        spec = specs[part.name]
        row_bytes = spec.size_bytes // spec.shape[0] if spec.shape and spec.shape[0] else 0
        first = (part.offset - spec.offset) // row_bytes if row_bytes else 0
        rows[part.name] = (first, first + (part.shape[0] if part.shape else 1))
    return rows


def _rows_from(text: str) -> Rows:
    return {name: (start, stop) for name, (start, stop) in json.loads(text).items()}


def _plan_run(number: int, key: str, version: int, plan: Plan, specs: Sequence[TensorSpec]) -> "PlanRun":
    from .group import PlanRun

    return PlanRun(number, key, version, plan, {spec.name: spec for spec in specs})


def _plan(key: str, specs: Sequence[TensorSpec], sender: str, requests: Mapping[str, Rows]) -> Plan:
    return make_plan(key, specs, {sender: whole(specs)}, requests)
