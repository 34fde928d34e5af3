"""Processes of actors, forked from one process that has imported what they need (``core/worker/fork_server.py``)."""

import asyncio
import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgpack

from ..durable.files import open_private

NO_DESCRIPTOR = -1
MOST_BYTES = 4096
"""The length of a message between node and server. A request, which holds an environment, is longer than a socket may
take at once: it travels in a file, whose descriptor is the message's first."""

# With it setproctitle leaves the environment readable for others, in /proc/PID/environ.
_SHORT_TITLES = {"SPT_NOENV": "1"}
# Room for a title: it takes the place of the command line.
_TITLE_CHARACTERS = 250
# The imports may come from a network's file system that many hosts read at once.
_FORK_TIMEOUT_S = 600.0
# The server reports an exit status at once, unless it is stopped.
_STATUS_TIMEOUT_S = 10.0


def has_ended(pidfd: int, timeout_ms: float | None) -> bool:
    """True if the process of ``pidfd`` has ended, or ends within ``timeout_ms``, for which this thread waits. None:
    waits until it has."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


class ForkedProcess:
    """A process that another one has forked. ``exited``: set when it has ended."""

    def __init__(self, pid: int, pidfd: int) -> None:
        """``pidfd``: of the process, NO_DESCRIPTOR if the kernel has none. It is closed when the process has ended."""
        self.pid = pid
        loop = asyncio.get_running_loop()
        self.exited = asyncio.Event()
        self._status: asyncio.Future[int | None] = loop.create_future()
        self._pidfd = pidfd
        if pidfd != NO_DESCRIPTOR:
            loop.add_reader(pidfd, self._has_ended)

    def has_exited(self) -> bool:
        """True if it has ended, also if the loop does not know yet."""
        if self.exited.is_set() or self._pidfd == NO_DESCRIPTOR:
            return self.exited.is_set()
        return has_ended(self._pidfd, 0.0)

    async def wait_exit(self) -> str:
        """Waits for its end; returns its manner."""
        await self.exited.wait()
        await asyncio.wait([self._status], timeout=_STATUS_TIMEOUT_S)
        status = self._status.result() if self._status.done() else None
        if status is None:
            return "ended with an unknown exit status"
        return f"killed by signal {-status}" if status < 0 else f"exit status {status}"

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal; does nothing if the process has ended."""
        if self.exited.is_set():
            return
        # By the pidfd: after its end the number of the process may be another one's.
        with contextlib.suppress(ProcessLookupError):  # it has ended, and the loop does not know yet
            if self._pidfd == NO_DESCRIPTOR:
                os.kill(self.pid, number)
            else:
                signal.pidfd_send_signal(self._pidfd, number)

    def reported(self, status: int) -> None:
        """The server has waited for the process."""
        if not self._status.done():
            self._status.set_result(status)
        self._has_ended()

    def server_ended(self) -> None:
        """The exit status stays unknown. Without a pidfd the end would stay unknown too: the process is killed."""
        if not self._status.done():
            self._status.set_result(None)
        if self._pidfd == NO_DESCRIPTOR and not self.exited.is_set():
            self.send_signal(signal.SIGKILL)
            self.exited.set()

    def _has_ended(self) -> None:
        if not self.exited.is_set():
            self.exited.set()
            if self._pidfd != NO_DESCRIPTOR:
                asyncio.get_running_loop().remove_reader(self._pidfd)
                os.close(self._pidfd)


class ForkServer:
    """The server's process, as its node sees it."""

    def __init__(
        self,
        modules: Sequence[str],
        late: Collection[str],
        environment: Mapping[str, str],
        log: Path,
        directory: Path | None = None,
    ) -> None:
        """Starts the process. ``modules``: those it imports. ``late``: variables in which the environments of the
        processes may differ from ``environment`` without a new interpreter. ``directory``: it is removed with all its
        files if this process dies. Raises OSError."""
        # Packets: each message arrives whole, with the descriptors that were sent with it. A stream would join
        # messages, and a pipe can't carry descriptors.
        self._node, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._node.setblocking(False)
        names = [
            str(server.fileno()),
            str(os.getpid()),
            "" if directory is None else str(directory),
            ",".join(modules).ljust(_TITLE_CHARACTERS),
        ]
        self._late = late
        self._environment = self._early(environment)
        # In a session of its own: the terminal's ctrl-C is the node's, which stops its actors in good order.
        with server, open_private(log, "ab") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "flexmarl.core.worker.fork_server", *names],
                stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file,
                env={**environment, **_SHORT_TITLES}, start_new_session=True, pass_fds=(server.fileno(),),
            )  # fmt: skip
        self._alone = asyncio.Lock()
        self._waiters: deque[asyncio.Future[ForkedProcess]] = deque()
        """The requests that are not answered, the oldest first."""
        self._processes: dict[int, ForkedProcess] = {}
        self.ended = False
        asyncio.get_running_loop().add_reader(self._node, self._read)

    @property
    def pid(self) -> int:
        """The number of the server's process."""
        return self._process.pid

    async def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> ForkedProcess:
        """A new process that runs ``worker_main`` with ``arguments``. ``descriptors``: its standard input, its log, and
        the socket at which it listens, if any. If this is cancelled, the process is killed. Raises OSError;
        ChildProcessError if the server has ended: a process that it may have forked ends when its standard input is
        closed, before it has an actor."""
        async with self._alone:  # one request is always short enough for the socket's buffer
            if self.ended:
                raise self._end_error()
            renewed = self._early(environment) != self._environment
            with os.fdopen(os.memfd_create("request"), "wb") as request:
                # As ``os.environ`` has them: a variable may hold bytes that are not UTF-8.
                request.write(
                    msgpack.packb((arguments, environment, renewed), unicode_errors="surrogateescape")
                )
                request.flush()
                try:
                    socket.send_fds(self._node, [b"fork"], [request.fileno(), *descriptors])
                except ConnectionError:  # it has ended, and the loop does not know yet
                    self.close()
                    raise self._end_error() from None
            waiter: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                async with asyncio.timeout(_FORK_TIMEOUT_S):
                    return await waiter
            except TimeoutError:
                text = f"no process was forked within {_FORK_TIMEOUT_S:g} s"
                raise TimeoutError(errno.ETIMEDOUT, text) from None
            except asyncio.CancelledError:
                # The answer came together with the cancellation: nothing else will end its process.
                if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                    waiter.result().send_signal(signal.SIGKILL)
                raise

    def _early(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The variables that a module may have read when it was imported."""
        return {name: value for name, value in environment.items() if name not in self._late}

    def close(self) -> None:
        """Ends the server; the processes that it has forked live on. Can be repeated."""
        if self.ended:
            return
        self.ended = True
        asyncio.get_running_loop().remove_reader(self._node)
        self._process.kill()  # first: the end of the socket alone would be the end of this process
        self._node.close()
        # The kernel takes some time to free the memory of the imported modules.
        threading.Thread(target=self._process.wait, name="end of fork server", daemon=True).start()
        while self._waiters:
            self._answer(self._end_error())
        for process in self._processes.values():
            process.server_ended()

    def _end_error(self) -> OSError:
        return ChildProcessError(errno.ECHILD, "the process that forks actors has ended")

    def _read(self) -> None:
        while not self.ended:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._node, MOST_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self.close()
                return
            answers, pid, number = msgpack.unpackb(message)
            if not answers:
                if (process := self._processes.pop(pid, None)) is not None:
                    process.reported(number)
            elif number:
                self._answer(OSError(number, f"fork: {os.strerror(number)}"))
            else:
                process = self._processes[pid] = ForkedProcess(pid, *descriptors or [NO_DESCRIPTOR])
                self._answer(process)

    def _answer(self, answer: ForkedProcess | OSError) -> None:
        waiter = self._waiters.popleft()
        if isinstance(answer, OSError):
            if not waiter.done():
                waiter.set_exception(answer)
        elif waiter.done():  # the wait for this process was cancelled
            answer.send_signal(signal.SIGKILL)
        else:
            waiter.set_result(answer)
