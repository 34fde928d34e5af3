"""Between processes of a host: device memory, opened by handle, without a way through the host's memory.

The writer copies its tensors into flat buffers of device memory, two sets of them per key, and exports each buffer's
handle once. A reader opens each handle once, on the device of the same UUID if it sees that, else on its own one. It
copies to its own tensors, and keeps the memory open for later versions.

A control block (``host_memory/block.py``) per set of buffers orders both. The reader holds its ``USE`` lock until its
copies are done: that is the acknowledgement, for which the writer waits before it overwrites the set. The reader holds
its ``OPEN`` lock until it has closed the memory: the writer waits for that before it frees it. A killed process's locks
go with it.
"""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from ...core.base.threads import in_thread
from ...core.telemetry import get_logger
from .. import payload
from ..errors import (
    CorruptState,
    DeviceError,
    ForeignHandle,
    NotAcknowledged,
    StaleHandle,
    TransportClosed,
    UnknownDevice,
)
from ..handle import BufferSource, CudaIpcSource, PathName, StateHandle, TensorSpec
from ..host_memory.arena import Arena
from ..host_memory.block import Block
from ..select import Place
from ..tensors.tensor_kind import Tensors
from ..transfers import CopyWorkers, Fill, Memory, Offer, ReadRequest, VersionedMemory
from .buffer_sets import BufferSet, BufferSets
from .devices import DeviceBuffer, DeviceEvent, Devices
from .opened_buffers import OpenedBuffers

# Few large buffers, not one for each tensor: each is exported, opened by every reader and checked by one sum.
BUFFER_BYTES: Final = 256 << 20
# Locks set no event: they are looked at again so often.
_POLL_S: Final = 0.005
# A killed owner says nothing, and the kernel reports the end of its locks to no other process: it is looked for.
_WATCH_S: Final = 0.25
log = get_logger(__name__)


def buffer_ranges(specs: Sequence[TensorSpec], size_bytes: int) -> list[tuple[int, int]]:
    """First byte and end of each flat buffer. All but the last have BUFFER_BYTES or more; no tensor is in two."""
    ranges, start = [], 0
    for spec in specs:
        if spec.offset - start >= BUFFER_BYTES:
            ranges.append((start, spec.offset))
            start = spec.offset
    if size_bytes > start:
        ranges.append((start, size_bytes))
    return ranges


class DeviceMemory(Memory[CudaIpcSource]):
    """``acknowledge_s``: the longest wait for readers before memory is written again or freed.

    It is one class because the buffers that it writes and those that it reads of other processes end together.
    """

    def __init__(
        self,
        place: Place,
        directory: Path,
        arena: Arena,
        workers: CopyWorkers,
        devices: Devices[Any],
        acknowledge_s: float = 30.0,
    ) -> None:
        self._place = place
        self._directory = directory
        self._workers = workers
        self._devices = devices
        self._acknowledge_s = acknowledge_s
        self._sets = BufferSets(arena, devices)
        self._written: dict[str, VersionedMemory[BufferSet]] = {}
        self._opened_buffers: dict[str, OpenedBuffers] = {}
        self._watching: asyncio.Task[None] | None = None
        self._closed = False

    # ----------------------------------------------------------------------- writing

    async def refusal(self, tensors: Tensors) -> str:
        """The reason why other processes can't open this one's memory of the tensors' device; empty if they can. Raises
        DeviceError."""
        return await self._sets.probe(self._device_of(map(payload.torch_kind().adopt, tensors.values())))

    async def offer(
        self,
        key: str,
        tensors: Tensors,
        *,
        version: int,
        paths: Sequence[PathName] = ("cuda_ipc",),
        after: DeviceEvent | None = None,
    ) -> Offer:
        written = self._written.setdefault(key, VersionedMemory())
        async with written.lock:
            if self._closed:
                raise TransportClosed
            layout = written.layout_of(tensors)
            sources = [payload.torch_kind().adopt(tensor) for tensor in tensors.values()]
            device = self._device_of(sources)
            # Once, not for each buffer: a later one would wait for computations that were begun meanwhile.
            after = after or self._devices.record([device])

            async def write(buffers: BufferSet) -> Offer:
                work = functools.partial(self._write, buffers, layout, sources, device, after)
                return await self._workers.run(layout.size_bytes, work)

            offered = await self._publish_next(key, written, device, version, layout, write)
        await self._sets.free_retired()
        return offered

    async def fill(
        self, key: str, layout: payload.Layout, fill: Fill, *, version: int, paths: Sequence[PathName]
    ) -> Offer:
        """The tensors are PyTorch's, on the first device."""
        written = self._written.setdefault(key, VersionedMemory())
        async with written.lock:
            if self._closed:
                raise TransportClosed
            device = self._device_of(())

            async def write(buffers: BufferSet) -> Offer:
                empty = {
                    spec.name: payload.torch_kind().empty(spec)
                    for spec in layout.specs
                    if not spec.size_bytes
                }
                views = {
                    name: view for _, _, named in _views(buffers, layout) for name, view in named.items()
                }
                await fill({name: (empty | views)[name] for name in layout.names})
                written_by = self._devices.record([device])
                work = functools.partial(self._write, buffers, layout, None, device, written_by)
                return await self._workers.run(layout.size_bytes, work)

            offered = await self._publish_next(key, written, device, version, layout, write)
        await self._sets.free_retired()
        return offered

    async def _publish_next(
        self,
        key: str,
        written: VersionedMemory[BufferSet],
        device: str,
        version: int,
        layout: payload.Layout,
        write: Callable[[BufferSet], Awaitable[Offer]],
    ) -> Offer:
        """Has ``write`` write the next version; nothing is published if it raises."""
        buffers = await self._begin_set(key, written, device, version, layout)
        try:
            offered = await write(buffers)
        except BaseException:
            buffers.control.end()
            written.failed(buffers)
            raise
        # The second set of the first version stays; what is free besides is of no more use.
        spare = [] if written.published else written.free[:1]
        written.free = [buffer_set for buffer_set in written.free if buffer_set not in spare]
        self._sets.retire(written.publish(buffers))
        written.free.extend(spare)
        return offered

    def _device_of(self, tensors: Iterable[Any]) -> str:
        """The device of the buffers: that of the tensors, or the first one for tensors on the CPU."""
        devices = {self._devices.device_of(tensor) for tensor in tensors} - {None}
        visible = self._devices.visible()
        if len(devices) > 1:
            raise DeviceError(str(min(map(str, devices))), f"a state is on one device, not on {len(devices)}")
        if not visible:
            raise UnknownDevice("cuda", visible)
        return next((device for device in devices if device is not None), visible[0])

    async def _begin_set(
        self, key: str, written: VersionedMemory[BufferSet], device: str, version: int, layout: payload.Layout
    ) -> BufferSet:
        """A set for the next version, in no list of ``written``, which no reader uses."""
        ranges = buffer_ranges(layout.specs, layout.size_bytes)
        # First, as a set that no reader has open any more may be the room for the next one.
        await self._sets.free_retired()
        fitting = [candidate for candidate in written.candidates() if candidate.suits(ranges, device)]
        if not fitting:
            self._sets.retire(written.free)
            written.free.clear()
            # The second one at once, not for the second version: a run that is going to lack memory does so at its
            # start. After a change of the layout there are two older ones, so one by one.
            await self._sets.make(key, ranges, device, 1 if written.published else 2, written.free)
            fitting = [written.free[0]]
        await self._wait_acknowledged(key, fitting[0], version, layout.size_bytes)
        written.take(fitting[0])
        return fitting[0]

    async def _wait_acknowledged(self, key: str, chosen: BufferSet, version: int, size_bytes: int) -> None:
        try:
            async with asyncio.timeout(self._acknowledge_s):
                while not chosen.control.begin(version, size_bytes):  # noqa: ASYNC110  # locks set no event
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as expired:
            readers = chosen.control.users()
            raise NotAcknowledged(key, chosen.control.name, readers, self._acknowledge_s) from expired

    def _write(
        self,
        buffers: BufferSet,
        layout: payload.Layout,
        sources: list[Any] | None,
        device: str,
        after: DeviceEvent,
        stop: threading.Event,
    ) -> Offer:
        """``sources``: None if the buffers were written in place, by computations before ``after``."""
        described = []
        named_sources = None if sources is None else dict(zip(layout.names, sources, strict=True))
        for number, ((start, end), buffer, views) in enumerate(_views(buffers, layout)):
            if stop.is_set():
                raise TransportClosed
            if named_sources is None:
                after.synchronize()
            else:
                targets, from_tensors = list(views.values()), [named_sources[name] for name in views]
                self._devices.copy(device, targets, from_tensors, after).synchronize()
            # After the copies: their memory is complete only when the event before is synchronized.
            checksum = self._devices.checksum(buffer.tensor[: end - start])
            described.append(BufferSource(buffers.handles[number], start, end - start, checksum))
        source = CudaIpcSource(
            "cuda_ipc", self._place.node, self._place.process, device, buffers.control.name,
            buffers.control.commit(), tuple(described),
        )  # fmt: skip
        return Offer((source,), layout.specs, layout.size_bytes, None)

    async def drop(self, key: str) -> None:
        written = self._written.get(key)
        if written is None:
            return
        async with written.lock:
            self._sets.retire(written.all())
            self._written.pop(key, None)
        await self._sets.free_retired()
        if not self._closed:
            self._begin_watching()  # a process that only writes would look for the readers at its next Set alone

    # ----------------------------------------------------------------------- reading

    async def fetch(
        self, request: ReadRequest[CudaIpcSource], into: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        self._begin_watching()
        _, targets = payload.destinations(request.handle.key, request.tensors, into)
        # Computations that were begun may still use the targets, or earlier tensors in the same memory.
        after = self._devices.record(self._devices.visible())
        await self._workers.run(request.size_bytes, functools.partial(self._read, request, targets, after))
        return {spec.name: target for spec, target in zip(request.tensors, targets, strict=True)}

    @asynccontextmanager
    async def view(
        self, request: ReadRequest[CudaIpcSource], *, checked: bool
    ) -> AsyncIterator[dict[str, Any]]:
        self._begin_watching()
        with self._reading(request) as buffers:
            views: dict[str, Any] = {}

            def open_all(stop: threading.Event) -> None:
                for memory, part, specs in self._open_buffers(request, buffers, stop, [], checked=checked):
                    tensors = payload.make_views(payload.torch_kind(), memory.tensor, -part.start, specs)
                    views.update(zip((spec.name for spec in specs), tensors, strict=True))

            await self._workers.run(request.size_bytes, open_all)
            empty = {
                spec.name: payload.torch_kind().empty(spec) for spec in request.tensors if not spec.size_bytes
            }
            yield {spec.name: (empty | views)[spec.name] for spec in request.tensors}

    def _begin_watching(self) -> None:
        if self._closed:
            raise TransportClosed
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    def _read(
        self,
        request: ReadRequest[CudaIpcSource],
        targets: Sequence[Any],
        after: DeviceEvent,
        stop: threading.Event,
    ) -> None:
        names = [spec.name for spec in request.tensors]
        into = dict(zip(names, map(payload.torch_kind().adopt, targets), strict=True))
        # The lock is the acknowledgement, not an event of the device: an event that a killed reader would have recorded
        # never comes, and a lock ends with its process.
        with self._reading(request) as buffers:
            for memory, part, specs in self._open_buffers(
                request, buffers, stop, [*into.values()], checked=True
            ):
                views = payload.make_views(payload.torch_kind(), memory.tensor, -part.start, specs)
                copied = self._devices.copy(memory.device, [into[spec.name] for spec in specs], views, after)
                copied.synchronize()
        _check_generation(request, buffers)

    @contextmanager
    def _reading(self, request: ReadRequest[CudaIpcSource]) -> Iterator[OpenedBuffers]:
        """The peer that has the version, which its owner does not write until this ends."""
        buffers = self._buffers_of(request.handle, request.source)
        if not buffers.begin():
            raise StaleHandle(request.handle.key, request.handle.version, buffers.control.version)
        try:
            _check_generation(request, buffers)
            yield buffers
        finally:
            buffers.end()

    def _open_buffers(
        self,
        request: ReadRequest[CudaIpcSource],
        buffers: OpenedBuffers,
        stop: threading.Event,
        targets: Sequence[Any],
        *,
        checked: bool,
    ) -> Iterator[tuple[DeviceBuffer, BufferSource, list[TensorSpec]]]:
        """The memory of each buffer that has tensors of ``request``, and these. All are opened before the first is
        given out. Raises OpenRefused."""
        handle, source = request.handle, request.source
        specs = [spec for spec in request.tensors if spec.size_bytes]
        inside = {
            part: [spec for spec in specs if part.start <= spec.offset and _end(spec) <= _end(part)]
            for part in source.buffers
        }
        if sum(map(len, inside.values())) != len(specs):
            raise ForeignHandle(source.block, str(self._directory), "a tensor is in no buffer")
        device = self._opening_device(source, targets)
        opened = [(buffers.open(device, part), part, some) for part, some in inside.items() if some]
        for memory, part, some in opened:
            if stop.is_set():
                raise TransportClosed
            if checked and (checksum := self._devices.checksum(memory.tensor)) != part.checksum:
                _check_generation(request, buffers)
                raise CorruptState(handle.key, handle.version, part.checksum, checksum)
            yield memory, part, some

    def _opening_device(self, source: CudaIpcSource, targets: Sequence[Any]) -> str:
        """The memory's own device if this process sees it; else that of the targets, or the first one."""
        visible = self._devices.visible()
        if source.device in visible:
            return source.device
        on_devices = {self._devices.device_of(target) for target in targets}
        return min((device for device in on_devices if device is not None), default=visible[0])

    def _buffers_of(self, handle: StateHandle, source: CudaIpcSource) -> OpenedBuffers:
        buffers = self._opened_buffers.get(source.block)
        if buffers is None:
            try:
                control = Block.open(self._directory, source.block, writable=True)
            except FileNotFoundError as error:
                raise StaleHandle(handle.key, handle.version, None) from error
            buffers = self._opened_buffers.setdefault(source.block, OpenedBuffers(control, self._devices))
        return buffers

    async def _watch(self) -> None:
        """Closes the memory of owners that have retired it or ended; frees this process's when its readers have."""
        while True:
            await asyncio.sleep(_WATCH_S)
            await self._sets.free_retired()
            for name, buffers in list(self._opened_buffers.items()):
                if not buffers.is_of_use:
                    await in_thread(buffers.close)
                    self._opened_buffers.pop(name, None)

    async def close(self) -> None:
        """Closes what it has opened, and waits until the readers of its own memory have closed that."""
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
        for buffers in self._opened_buffers.values():
            await in_thread(buffers.close)
        self._opened_buffers.clear()
        for written in self._written.values():
            self._sets.retire(written.all())
        self._written.clear()
        try:
            async with asyncio.timeout(self._acknowledge_s):
                await self._sets.free_retired()
                while self._sets.has_retired:
                    await asyncio.sleep(_POLL_S)
                    await self._sets.free_retired()
        except TimeoutError:
            # Freeing it would be undefined for them. It goes with this process.
            log.error("device memory is still open in other processes", processes=self._sets.users())


def _views(
    buffers: BufferSet, layout: payload.Layout
) -> Iterator[tuple[tuple[int, int], DeviceBuffer, dict[str, Any]]]:
    """The first byte and the end of each buffer in the payload, the buffer, and the tensors in it."""
    for (start, end), buffer in zip(buffers.ranges, buffers.buffers, strict=True):
        specs = [spec for spec in layout.specs if start <= spec.offset and _end(spec) <= end]
        views = payload.make_views(payload.torch_kind(), buffer.tensor, -start, specs)
        yield (start, end), buffer, {spec.name: view for spec, view in zip(specs, views, strict=True)}


def _end(part: TensorSpec | BufferSource) -> int:
    start = part.start if isinstance(part, BufferSource) else part.offset
    return start + part.size_bytes


def _check_generation(request: ReadRequest[CudaIpcSource], buffers: OpenedBuffers) -> None:
    if buffers.control.generation != request.source.generation:
        raise StaleHandle(request.handle.key, request.handle.version, buffers.control.version)
