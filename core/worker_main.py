"""The process of one spawned actor, started by ``process_node.py``:
``python -m flexmarl.core.worker_main PARENT DIRECTORY NAME private|shared``.
``PARENT``: the parent's process id. ``private``: the directory is the run's own, and is removed if the parent has died.

Standard input carries one length-prefixed MessagePack map (``WorkerInit``) and then stays open for as long as
the parent lives: its end means that the parent is gone, and the process ends with it. A fork of the parent keeps that
pipe open, so the process also watches the parent itself (pidfd_open(2)).
"""

import asyncio
import functools
import os
import select
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import uvloop

from .actor import Actor
from .collector import importing, spare_collector
from .errors import origin_of
from .private_directory import use_with_others
from .ref import ActorRef
from .signature import constructor_signature
from .supervision.worker_init import WorkerInit, import_class, read_init
from .system import ActorSystem
from .telemetry import configure_logging, get_logger
from .wire.curve import Keys
from .wire.zeromq import ZmqWire, ipc_address

log = get_logger(__name__)

# The supervisor's process may be stopped (ctrl-Z) for days, and is asked nothing else.
_REPORT_TIMEOUT_S = 30 * 24 * 3600.0


def main() -> NoReturn:
    # The launcher handles the terminal's ctrl-C, and stops its actors.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent, directory, name = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    private = sys.argv[4] == "private"

    def watch_parent(wait_gone: Callable[[], None]) -> None:
        work = functools.partial(_end_with_parent, wait_gone, directory, name, private)
        threading.Thread(target=work, name="parent watch", daemon=True).start()

    if private:
        use_with_others(directory)
    watch_parent(functools.partial(_wait_process_gone, parent))
    try:
        init = read_init(sys.stdin.buffer)
    except EOFError:
        _end_with_parent(_wait_pipe_closed, directory, name, private)
    watch_parent(_wait_pipe_closed)
    configure_logging(name, sys.stderr, init.log_level)
    status = uvloop.run(_serve(name, init, directory))
    # Everything is closed. A regular exit of the interpreter, with torch in it, takes seconds.
    sys.stderr.flush()
    os._exit(status)


async def _serve(name: str, init: WorkerInit, directory: Path) -> int:
    sys.path += [path for path in init.search_path if path not in sys.path]
    keys = None if init.keys_file is None else Keys.load(Path(init.keys_file))
    wire = ZmqWire(init.tcp or ipc_address(directory, name), keys, init.epoch, init.listening)
    async with ActorSystem(
        name, directory, tcp=init.tcp, keys=keys, wire=wire, settings=init.settings
    ) as system:
        system._local.reserve(name)  # calls to an actor that is being restarted wait for the end of its start
        system._local.network.trust(init.supervisor["address"])  # its end closes the pipe
        system._directory.add_upstream(init.supervisor["address"])
        supervisor: ActorRef[Any] = system.ref(init.supervisor["name"], init.supervisor["address"])
        try:
            await system.add(_build(init, system), name)
            spare_collector()
            await supervisor.ask("ready", name, init.epoch, timeout_s=_REPORT_TIMEOUT_S)
            error = await _wait_stopped(system)
        except (KeyboardInterrupt, SystemExit, asyncio.CancelledError):
            raise
        except BaseException as raised:  # noqa: BLE001  # supervision: any error is reported to the parent, and the process ends
            error = raised
        if error is None:
            return 0
        text = "".join(traceback.format_exception(error))
        log.error("actor failed", error=text)
        await supervisor.ask("failed", name, *origin_of(error, name), text, timeout_s=_REPORT_TIMEOUT_S)
        return 1


def _build(init: WorkerInit, system: ActorSystem) -> Actor:
    with importing():
        actor_class: Any = import_class(init.actor_class)
    constructor = constructor_signature(actor_class)
    actor: Actor = actor_class(**constructor.arguments(init.args, init.kwargs, system._local.network))
    return actor


async def _wait_stopped(system: ActorSystem) -> BaseException | None:
    """Waits for a request to stop, or for a failure: returns None, or its error."""
    stop = asyncio.ensure_future(system._system_actor.stop_requested.wait())
    ends: list[asyncio.Future[Any]] = [stop, system.failure]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()
    return system.failure.result() if system.failure.done() else None


def _wait_pipe_closed() -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing is written after the init: this returns when the pipe is closed


def _wait_process_gone(parent: int) -> None:
    """Waits until the process ``parent``, which has started this one, has ended."""
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    except OSError:  # Linux before 5.3, or a sandbox that forbids the call: only the pipe shows the end
        threading.Event().wait()
        return
    if os.getppid() == parent:  # else that number may be another process's by now
        select.select([descriptor], [], [])


def _end_with_parent(wait_gone: Callable[[], None], directory: Path, name: str, private: bool) -> NoReturn:
    """Ends the process when the parent has died. Runs in a thread of its own: a busy loop would notice too late."""
    wait_gone()
    # The launcher can't clean up any more, so every orphan does.
    if private:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        Path(ipc_address(directory, name).removeprefix("ipc://")).unlink(missing_ok=True)
    os._exit(1)


if __name__ == "__main__":
    main()
