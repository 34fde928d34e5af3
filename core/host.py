"""The process of one spawned actor: ``python -m flexmarl.core.host DIRECTORY NAME``, started by ``supervisor.py``.

Standard input carries one length-prefixed MessagePack map (``HostInit``) and then stays open for as long as
the parent lives: its end means that the parent is gone, and the process ends with it.
"""

import asyncio
import importlib
import os
import shutil
import signal
import struct
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import msgpack
import structlog
import uvloop
from pydantic import TypeAdapter

from . import codec
from .actor import Actor
from .errors import text_of
from .ref import ActorRef
from .system import ActorSystem
from .telemetry import configure_logging

log = structlog.get_logger()

_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class HostInit:
    """``actor_class`` is ``module:Class``; ``kwargs`` are its constructor's, checked against its annotations."""

    actor_class: str
    kwargs: dict[str, Any]
    supervisor: dict[str, str]


def write_init(init: HostInit) -> bytes:
    body = codec.pack(init)
    return _LENGTH.pack(len(body)) + body


def read_init(stream: BinaryIO) -> HostInit:
    """Raises EOFError where the parent was gone before it had written all of it."""
    header = stream.read(_LENGTH.size)
    size_bytes = _LENGTH.unpack(header)[0] if len(header) == _LENGTH.size else 0
    body = stream.read(size_bytes)
    if not size_bytes or len(body) < size_bytes:
        raise EOFError
    return TypeAdapter(HostInit).validate_python(msgpack.unpackb(body, strict_map_key=False))


def main() -> NoReturn:
    # The terminal's ctrl-C is the launcher's to handle; it tells its actors to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    directory, name = Path(sys.argv[1]), sys.argv[2]
    try:
        init = read_init(sys.stdin.buffer)
    except EOFError:
        _end_with_parent(directory)
    threading.Thread(target=_end_with_parent, args=[directory], name="parent watch", daemon=True).start()
    configure_logging(name, sys.stderr)
    status = uvloop.run(_host(name, init, directory))
    # All that the process held is closed. Taking the interpreter apart, with torch in it, would last seconds.
    sys.stderr.flush()
    os._exit(status)


async def _host(name: str, init: HostInit, directory: Path) -> int:
    async with ActorSystem(name, directory) as system:
        supervisor: ActorRef[Any] = system.ref(init.supervisor["name"], init.supervisor["address"])
        try:
            await system.add(_build(init, system), name)
            await supervisor.ask("ready", name, os.getpid())
            error = await _until_stopped(system)
        except Exception as raised:  # noqa: BLE001  # supervision: whatever it is, the parent is told and the process ends
            error = raised
        if error is None:
            return 0
        text = "".join(traceback.format_exception(error))
        log.error("actor failed", error=text)
        await supervisor.ask("failed", name, f"{type(error).__name__}: {text_of(error)}", text)
        return 1


def _build(init: HostInit, system: ActorSystem) -> Actor:
    module, _, class_name = init.actor_class.partition(":")
    actor_class = getattr(importlib.import_module(module), class_name)
    if not issubclass(actor_class, Actor):
        raise TypeError(f"{init.actor_class} is no Actor")
    constructor = codec.signature_of(actor_class, "__init__") or codec.NO_ARGUMENTS
    actor: Actor = actor_class(**constructor.arguments([], init.kwargs, system))
    return actor


async def _until_stopped(system: ActorSystem) -> BaseException | None:
    """None when the process was asked to stop; what a background task raised, where one did."""
    stop = asyncio.ensure_future(system.process.stop_asked.wait())
    ends: list[asyncio.Future[Any]] = [stop, system.failure]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()
    return system.failure.result() if system.failure.done() else None


def _end_with_parent(directory: Path) -> NoReturn:
    """Runs in a thread of its own: a loop that is busy importing would notice seconds later."""
    os.read(
        sys.stdin.fileno(), 1
    )  # nothing is ever written after the init: this returns when the pipe is closed
    # The launcher can't clean up any more, so every orphan does; there is nobody left to reply to.
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
