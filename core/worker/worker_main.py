"""Entry point of a spawned actor's process, which ``fork_server.py`` forks, or starts as a program:
``python -P -m flexmarl.core.worker.worker_main PARENT LISTENING DIRECTORY NAME``.
``PARENT``: a pidfd (pidfd_open(2)) of the node's process. ``LISTENING``: the descriptor of the socket that listens
already, over TCP. Without it, each of the two is -1.

Standard input carries one length-prefixed MessagePack map (``WorkerInit``) and then stays open for as long as
the parent lives: its end means that the parent is gone, and the process ends with it. A fork of the parent keeps that
pipe open, so the process also watches the parent itself.
"""

import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

import uvloop

from ..durable.private_directory import use_with_others
from ..supervision.forking import NO_DESCRIPTOR, has_ended
from ..supervision.worker_init import WorkerInit, read_init
from ..system import ActorSystem
from ..telemetry import configure_logging
from ..wire.curve import Keys
from ..wire.zeromq import ZmqWire, ipc_address, remove_socket
from .hosted_actor import HostedActor

_ENDING_MS: Final = 5000.0


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs one actor, and ends the process: with status 0 if the actor was asked to stop, 1 if it failed, its parent
    ended or gave it up. Arguments: see the module."""
    # The launcher handles the terminal's ctrl-C, and stops its actors.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent, listening = int(arguments[0]), int(arguments[1])
    directory, name = Path(arguments[2]), arguments[3]

    def watch_parent(wait_gone: Callable[[], None]) -> None:
        work = functools.partial(_end_with_parent, wait_gone, directory, name)
        threading.Thread(target=work, name="parent watch", daemon=True).start()

    use_with_others(directory)
    watch_parent(functools.partial(_wait_process_gone, parent))
    try:
        init = read_init(sys.stdin.buffer)
    except EOFError:
        _end_with_parent(functools.partial(_wait_pipe_closed, parent), directory, name)
    watch_parent(functools.partial(_wait_pipe_closed, parent))
    configure_logging(name, sys.stderr, init.log_level)
    status = uvloop.run(_serve(name, init, directory, None if listening == NO_DESCRIPTOR else listening))
    # Everything is closed. A regular exit of the interpreter, with torch in it, takes seconds.
    sys.stderr.flush()
    os._exit(status)


async def _serve(name: str, init: WorkerInit, directory: Path, listening: int | None) -> int:
    sys.path += [path for path in init.search_path if path not in sys.path]
    keys = None if init.keys_file is None else Keys.load(Path(init.keys_file))
    inherited = None if listening is None else socket.socket(fileno=listening)
    wire = ZmqWire(init.tcp or ipc_address(directory, name), keys, init.epoch, inherited)
    async with ActorSystem(
        name, directory, tcp=init.tcp, keys=keys, wire=wire, settings=init.settings
    ) as system:
        stopped = await HostedActor(name, init, owns_process=True).serve(system)
    return 0 if stopped else 1


def _wait_pipe_closed(parent: int) -> None:
    """Waits until the other end of standard input is closed, as when the parent has ended. Ends this process if the
    parent lives on: it has given this actor up, and others may use the directory."""
    os.read(sys.stdin.fileno(), 1)  # nothing is written after the init
    if not has_parent_ended(parent):
        os._exit(1)


def has_parent_ended(parent: int) -> bool:
    """True if the process of the pidfd ``parent`` has closed its files because it ends, as it does first."""
    return parent == NO_DESCRIPTOR or has_ended(parent, _ENDING_MS)


def pidfd_of_parent(parent: int) -> int:
    """Returns a pidfd of the process ``parent``, which has started this one; NO_DESCRIPTOR if the kernel gives none."""
    try:
        descriptor = os.pidfd_open(parent)
    except OSError:
        # It has ended; or Linux is before 5.3, or a sandbox forbids the call: then only pipes show the end.
        return NO_DESCRIPTOR
    if os.getppid() == parent:
        return descriptor
    os.close(descriptor)  # the number may be another process's by now
    return NO_DESCRIPTOR


def _wait_process_gone(parent: int) -> None:
    """Waits until the process of the pidfd ``parent`` has ended."""
    if parent == NO_DESCRIPTOR:
        threading.Event().wait()
    has_ended(parent, None)


def _end_with_parent(wait_gone: Callable[[], None], directory: Path, name: str) -> NoReturn:
    """Ends the process when the parent has died. Runs in a thread of its own: a busy loop would notice too late."""
    wait_gone()
    # The launcher can't clean up any more. A directory that is the run's own is removed by the process of the forks.
    remove_socket(ipc_address(directory, name))
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
