"""One incarnation of an actor that has a process of its own, as its supervisor sees it: from its start to its end."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from ..errors import ActorDead, FlexmarlError
from ..ref import ActorRef
from ..telemetry import get_logger
from .system_actor import SystemActor

log = get_logger(__name__)

# A policy may be downloaded and loaded first. A process that lives is not late: one that does not is noticed at once.
START_TIMEOUT_S = 3600.0
_STOP_GRACE_S = 5.0
_TERM_GRACE_S = 2.0
# A process in an uninterruptible system call (a dead NFS server, a driver) outlives SIGKILL: nobody waits for it.
_KILL_GRACE_S = 5.0
_LOG_TAIL_LINES = 15
_LOG_TAIL_BYTES = 2**16


class ChildProcess:
    """``death``: why it ended, or is going to; ``address``: of its actor system, once it is known."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.name = name
        self.address = ""
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.death: FlexmarlError | None = None
        self.unwanted = False
        """Its end was asked for: nobody mourns it."""
        self.mourned = False
        """Its supervisor has decided what becomes of its actor."""
        self._process = process
        self._log_path = log_path

    @classmethod
    async def start(
        cls, name: str, arguments: list[str], init: bytes, log_path: Path, env: Mapping[str, str] | None
    ) -> "ChildProcess":
        """``init``: what ``worker_main.py`` reads first; ``env``: None inherits this process's. Raises OSError."""
        with log_path.open("ab") as log_file:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "flexmarl.core.worker_main", *arguments,
                stdin=asyncio.subprocess.PIPE, stdout=log_file, stderr=log_file,
                env=env, start_new_session=True,
            )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(init)  # never closed: its end tells the child that this process is gone
        return cls(name, process, log_path)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def until_ended(self) -> FlexmarlError:
        """Waits for the end of the process; why it ended. To be awaited once, by its supervisor."""
        code = await self._process.wait()
        if self.death is None:
            how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
            last = "" if self.unwanted else _last_lines(self._log_path)
            self.death = ActorDead(self.name, f"process {self.pid} {how}{last}")
        self.ended.set()
        return self.death

    async def until_ready(self) -> None:
        """Returns once ``on_start`` is through.

        Raises ActorFailed where constructor or ``on_start`` raised, ActorDead where the process ended otherwise or is
        not ready within START_TIMEOUT_S. It is killed where it is late, or nobody waits for it any more.
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
            assert self.death is not None
            raise self.death
        if not self.started.is_set():
            self.death = ActorDead(
                self.name, f"not ready within {START_TIMEOUT_S:g} s{_last_lines(self._log_path)}"
            )
            self.kill()
            await self.until_gone()
            raise self.death

    async def stop(self, system_actor: ActorRef[SystemActor]) -> None:
        """Asks the process to end, by its ``system_actor``, then makes it."""
        self.unwanted = True
        if self.started.is_set() and not self.ended.is_set():
            try:
                if self.death is None:  # else it is ending already
                    with contextlib.suppress(ActorDead):  # it ended before it could say that it would
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
        await self.until_gone()

    def kill(self) -> None:
        """Ends the process at once, whatever it is doing."""
        self.unwanted = True
        self._send_signal(signal.SIGKILL)

    async def until_gone(self) -> None:
        """Waits for a process that is ending, or was killed; but not for ever."""
        try:
            await asyncio.wait_for(self.ended.wait(), _KILL_GRACE_S)
        except TimeoutError:
            log.error("process does not end", name=self.name, pid=self.pid, waited_s=_KILL_GRACE_S)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and the loop has not been told yet
            self._process.send_signal(number)


def _last_lines(log_path: Path) -> str:
    """The end of an actor's log, as a paragraph that begins a new line; empty where there is nothing to show."""
    try:
        with log_path.open("rb") as log_file:
            log_file.seek(max(0, log_path.stat().st_size - _LOG_TAIL_BYTES))
            lines = log_file.read().decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    except OSError as error:
        return f"\nIts log can't be read: {error}"
    return f"\nThe last lines of {log_path}:\n" + "\n".join(lines) if lines else ""
