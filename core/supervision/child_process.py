"""One process of a supervised actor, from its start to its end."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from ..errors import ActorDead, FlexmarlError
from ..ref import ActorRef
from ..telemetry import get_logger
from .system_api import SystemApi

log = get_logger(__name__)

# A large model may be loaded first. A process that ends before it is ready is noticed at once.
START_TIMEOUT_S = 3600.0
_STOP_GRACE_S = 5.0
_TERM_GRACE_S = 2.0
# A process in an uninterruptible system call (a dead NFS server, a driver) outlives SIGKILL: no wait is longer.
_KILL_GRACE_S = 5.0
# PF_EXITING of include/linux/sched.h
_PF_EXITING = 0x4
_LOG_TAIL_LINES = 15
_LOG_TAIL_BYTES = 2**16


class ChildProcess:
    """``exit_reason``: set when it has ended, or has reported a failure. ``address``: of its actor system, once it is
    known."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.name = name
        self.address = ""
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.exit_reason: FlexmarlError | None = None
        self.stop_requested = False
        """Its exit is not a failure."""
        self.exit_handled = False
        """The supervisor has handled its exit."""
        self._process = process
        self._log_path = log_path

    @classmethod
    async def start(
        cls, name: str, arguments: list[str], init: bytes, log_path: Path, env: Mapping[str, str] | None
    ) -> "ChildProcess":
        """``init``: the first bytes on its standard input (``worker_init.py``). ``env``: None inherits this process's.
        Raises OSError."""
        with log_path.open("ab") as log_file:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "flexmarl.core.worker_main", *arguments,
                stdin=asyncio.subprocess.PIPE, stdout=log_file, stderr=log_file,
                env=env, start_new_session=True,
            )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(
            init
        )  # stays open: the child ends at the end of this file, when this process is gone
        return cls(name, process, log_path)

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_exited(self) -> bool:
        """True if it has ended or is ending, also if the loop does not know yet."""
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # the loop has waited for it
            return True
        return ended or is_ending(self.pid)

    async def wait_ended(self) -> FlexmarlError:
        """Waits for the end of the process; returns the reason. To be awaited once, by its supervisor."""
        code = await self._process.wait()
        if self.exit_reason is None:
            how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
            last = "" if self.stop_requested else _last_lines(self._log_path)
            self.exit_reason = ActorDead(self.name, f"process {self.pid} {how}{last}")
        self.ended.set()
        return self.exit_reason

    async def wait_ready(self) -> None:
        """Waits for the end of ``on_start``.

        Raises ActorFailed if the constructor or ``on_start`` raised, ActorDead if the process ended otherwise or is not
        ready within START_TIMEOUT_S. The process is killed if it is late, or if this wait is cancelled.
        """
        ended = asyncio.ensure_future(self.ended.wait())
        started = asyncio.ensure_future(self.started.wait())
        try:
            await asyncio.wait([started, ended], timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:
            started.cancel()
            ended.cancel()
        if self.ended.is_set():
            assert self.exit_reason is not None
            raise self.exit_reason
        if not self.started.is_set():
            self.exit_reason = ActorDead(
                self.name, f"not ready within {START_TIMEOUT_S:g} s{_last_lines(self._log_path)}"
            )
            self.kill()
            await self.wait_gone()
            raise self.exit_reason

    async def stop(self, system_actor: ActorRef[SystemApi]) -> None:
        """Asks the process to end, by its ``system_actor``; after a grace period by SIGTERM, then SIGKILL."""
        self.stop_requested = True
        if self.started.is_set() and not self.ended.is_set():
            try:
                if self.exit_reason is None:  # else it is ending already
                    with contextlib.suppress(ActorDead):  # it ended before its reply left
                        await system_actor.within(_STOP_GRACE_S).stop()
                await asyncio.wait_for(self.ended.wait(), _STOP_GRACE_S)
            except (FlexmarlError, TimeoutError) as error:
                log.warning("actor did not stop when asked", name=self.name, error=str(error))
        if not self.ended.is_set():
            self._send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.ended.wait(), _TERM_GRACE_S)
            except TimeoutError:
                log.warning("actor ignored SIGTERM", name=self.name)
                self.kill()
        await self.wait_gone()

    def kill(self) -> None:
        """Ends the process at once."""
        self.stop_requested = True
        self._send_signal(signal.SIGKILL)

    async def wait_gone(self) -> None:
        """Waits for a process that is ending or was killed, at most 5 s; logs an error if it does not end."""
        try:
            await asyncio.wait_for(self.ended.wait(), _KILL_GRACE_S)
        except TimeoutError:
            log.error("process does not end", name=self.name, pid=self.pid, waited_s=_KILL_GRACE_S)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and the loop does not know yet
            self._process.send_signal(number)


def is_ending(pid: int) -> bool:
    """True from the time on at which the kernel begins to end the process. Its sockets are closed some time before it
    can be waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # no such process, or no Linux
        return False
    return bool(int(fields[6]) & _PF_EXITING)


def _last_lines(log_path: Path) -> str:
    """The end of an actor's log, as a paragraph that begins a new line; empty if the log is."""
    try:
        with log_path.open("rb") as log_file:
            log_file.seek(max(0, log_path.stat().st_size - _LOG_TAIL_BYTES))
            lines = log_file.read().decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    except OSError as error:
        return f"\nIts log can't be read: {error}"
    return f"\nThe last lines of {log_path}:\n" + "\n".join(lines) if lines else ""
