"""Processes that a test starts on the card, and that do what it asks of them with the product's own classes.

    with Peer(card, directory) as owner:
        handle = owner.call(publish, 3)        # ``publish(side, 3)`` in the other process

The test's own process makes no context on the card: it reads the driver's figures alone, so that what a process takes
and leaves is seen.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cached_property
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeVar

from flexmarl.transport.device_memory.devices import Devices
from flexmarl.transport.errors import DeviceError
from flexmarl.transport.state import StateTransport

from .checks import Card

if TYPE_CHECKING:
    from torch import Tensor

_PROGRAM: Final = (
    "import sys; sys.path.append(sys.argv.pop(1)); from scripts.gpu.peers import main; main(sys.argv[1:])"
)
_ROOT: Final = Path(__file__).parents[2]
_END_S: Final = 20.0
_ANSWER_S: Final = 60.0
_CPU_END_S: Final = 120.0  # other programs may use the cores
_CPU_ANSWER_S: Final = 600.0
_FREED_S: Final = 10.0
_KILLED_S: Final = 120.0  # at once, unless the driver holds it up
FAKE: Final = "GPU-fake"
FAKE_BYTES: Final = 1 << 29
_NOISE_BYTES: Final = 16 << 20

P = ParamSpec("P")
R = TypeVar("R")


class PeerFailed(Exception):
    """The other process has raised an error, ended, or not answered."""


class Side:
    """Devices and transport of a process, made when they are first used."""

    def __init__(self, device: str, directory: Path, refuses: Collection[str] = ()) -> None:
        """``refuses``: calls of CUDA that fail in this process."""
        self.device = device
        self.directory = directory
        self.kept: dict[str, Any] = {}
        self._refuses = tuple(refuses)
        self._stack = AsyncExitStack()
        self._transport: StateTransport | None = None

    @cached_property
    def devices(self) -> Devices[Any]:
        return make_devices(self.device, self.directory, self._refuses)

    async def transport(self) -> StateTransport:
        """This process's transport."""
        if self._transport is None:
            opening = StateTransport(self.directory, self.devices)
            self._transport = await self._stack.enter_async_context(opening)
        return self._transport

    def place(self, values: "Tensor") -> "Tensor":
        """A copy of ``values`` in memory of the device."""
        if self.device != "cpu":
            return values.to(self.device, copy=True)
        memory = self.devices.allocate(FAKE, values.nbytes).tensor
        tensor: Tensor = memory.view(values.dtype).view(values.shape).copy_(values)
        return tensor

    async def close(self) -> None:
        await self._stack.aclose()


def make_devices(device: str, directory: Path, refuses: Collection[str] = ()) -> Devices[Any]:
    """The product's devices; on a CPU simulated ones, which processes share by the directory. ``refuses``: calls of
    CUDA that fail: ``cudaIpcOpenMemHandle``."""
    if device == "cpu":
        from tests.fake_devices import FakeDevices

        return FakeDevices(directory, {FAKE: FAKE_BYTES}, refuses=refuses)
    from flexmarl.transport.device_memory.cuda import CudaBuffer, CudaDevices

    if not refuses:
        return CudaDevices([device])

    class WrongHandles(CudaDevices):
        """The driver refuses its handles, when this process opens one and when others open one of this process."""

        def export(self, buffer: CudaBuffer) -> bytes:
            return _inverted(super().export(buffer))

        def open(self, device: str, handle: bytes, size_bytes: int) -> CudaBuffer:
            return super().open(device, _inverted(handle), size_bytes)

    return WrongHandles([device])


def _inverted(handle: bytes) -> bytes:
    return bytes(byte ^ 0xFF for byte in handle)


def pattern(seed: int, size_bytes: int, device: str = "cpu") -> "Tensor":
    """Bytes that are the same on each device for one ``seed``, all of them others for another one."""
    import torch

    words = torch.arange(-(-size_bytes // 8), dtype=torch.int64, device=device)
    return words.add_(1).mul_(0x5851F42D4C957F2D).add_(seed * 0x9E3779B97F4B).view(torch.uint8)[:size_bytes]


class Peer:
    """A process with a ``Side``. It ends when its context does, unless it was killed before."""

    def __init__(
        self,
        card: Card,
        directory: Path,
        *,
        refuses: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``directory``: of the transports that exchange states. ``environment``: more variables."""
        self._answer_s = (_ANSWER_S if card.is_cuda else _CPU_ANSWER_S) * card.limit_factor
        self._end_s = (_END_S if card.is_cuda else _CPU_END_S) * card.limit_factor
        self._connection, far_end = Pipe()
        arguments = [str(_ROOT), card.device, str(directory), str(far_end.fileno()), *refuses]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, *arguments],
            stdin=subprocess.DEVNULL, pass_fds=[far_end.fileno()], env={**os.environ, **(environment or {})},
        )  # fmt: skip
        far_end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def call(
        self, function: Callable[Concatenate[Side, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """The result of ``function`` in the other process. Raises PeerFailed, also for one that does not
        answer."""
        self.begin(function, *args, **kwargs)
        return self.answer()  # type: ignore[no-any-return]

    def begin(
        self, function: Callable[Concatenate[Side, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Begins a call. ``answer`` has its result."""
        try:
            self._connection.send((function, args, kwargs))
        except OSError as error:
            raise PeerFailed(f"the process has ended: {error}") from error

    def answer(self, timeout_s: float | None = None) -> Any:
        """The result of the call that was begun."""
        timeout_s = timeout_s or self._answer_s
        try:
            if not self._connection.poll(timeout_s):
                raise PeerFailed(f"no answer within {timeout_s:g} s")
            is_done, result = self._connection.recv()
        except (EOFError, OSError) as error:
            status = self.process.wait(self._end_s)
            raise PeerFailed(f"the process has ended with status {status}") from error
        if not is_done:
            raise PeerFailed(result)
        return result

    def kill(self) -> None:
        """Ends the process by SIGKILL, and returns when it has ended."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(_KILLED_S)

    def end(self) -> int:
        """Has the process close all it has, and end; returns its exit status. One that does not end is killed."""
        self._connection.close()
        try:
            return self.process.wait(self._end_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(_KILLED_S)


class UsedMemory:
    """The bytes of the card that all processes together have taken, by its driver."""

    def __init__(self, card: Card, directory: Path) -> None:
        self._devices = make_devices(card.device, directory)
        self.device = self._devices.visible()[0]
        self.noise_bytes = _NOISE_BYTES if card.is_cuda else 0
        """The driver's figures differ by so much without any process: its own tables grow and shrink."""
        self._freed_s = _FREED_S * card.limit_factor

    def read(self) -> int:
        use = self._devices.memory(self.device)
        return use.total_bytes - use.free_bytes

    def free(self) -> int:
        return self._devices.memory(self.device).free_bytes

    def wait_until(self, most_bytes: int) -> int:
        """The bytes when they are at most ``most_bytes``, or after some seconds: the driver frees a process's memory a
        moment after its end."""
        deadline = time.monotonic() + self._freed_s
        while (used := self.read()) > most_bytes and time.monotonic() < deadline:
            time.sleep(0.05)
        return used


# ----------------------------------------------------------------------- in the other process


def main(arguments: list[str]) -> None:
    """Does what comes over a connection, until the other end is closed."""
    device, directory, descriptor, *refuses = arguments
    os.set_inheritable(int(descriptor), False)
    asyncio.run(_serve(Connection(int(descriptor)), Side(device, Path(directory), refuses)))


async def _serve(connection: Connection, side: Side) -> None:
    try:
        while True:
            try:
                function, args, kwargs = await asyncio.to_thread(connection.recv)
            except EOFError:
                return
            try:
                answer = True, await function(side, *args, **kwargs)
            except Exception as error:  # noqa: BLE001  # the other end raises it
                traceback.print_exc()
                answer = False, f"{type(error).__name__}: {error}"
            connection.send(answer)
    finally:
        try:
            await side.close()
        except DeviceError:
            traceback.print_exc()
            raise
