"""The process of one spawned actor, started by ``child_process.py``:
``python -m flexmarl.core.supervision.worker_main DIRECTORY NAME private|shared``.
``private``: the directory is the run's own, and removed where the parent can't do it any more.

Standard input carries one length-prefixed MessagePack map (``HostInit``) and then stays open for as long as
the parent lives: its end means that the parent is gone, and the process ends with it.
"""

import asyncio
import gc
import importlib
import os
import shutil
import signal
import struct
import sys
import threading
import traceback
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import msgpack
import uvloop
from pydantic import TypeAdapter

from ..actor import Actor
from ..errors import LocalProtocolError, text_of
from ..protocol import codec
from ..protocol.session import Settings
from ..ref import ActorRef
from ..signature import NO_ARGUMENTS, signature_of
from ..system import ActorSystem
from ..telemetry import configure_logging, get_logger
from ..wire.curve import Keys
from ..wire.zeromq import Tcp, ipc_address

log = get_logger(__name__)

_LENGTH = struct.Struct("!I")
# Python's own is (700, 10, 10). Messages leave no cycles behind: looking for them that often took a third of the time
# of a store that keeps many rows.
_GC_THRESHOLD = (20_000, 10, 10)


@dataclass(frozen=True, slots=True)
class HostInit:
    """``actor_class`` is ``module:Class``; ``kwargs`` are its constructor's, checked against its annotations.

    ``tcp``: where to listen, None: on an ipc socket in the directory. It comes without keys: they are in ``keys_file``.
    ``search_path``: where else to import from (``sys.path``).
    """

    actor_class: str
    kwargs: dict[str, Any]
    supervisor: dict[str, str]
    tcp: Tcp | None
    keys_file: str | None
    settings: Settings
    search_path: list[str]


def write_init(init: HostInit) -> bytes:
    body = codec.Encoder().pack(init)
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
    directory, name, private = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "private"
    try:
        init = read_init(sys.stdin.buffer)
    except EOFError:
        _end_with_parent(directory, name, private)
    threading.Thread(
        target=_end_with_parent, args=[directory, name, private], name="parent watch", daemon=True
    ).start()
    configure_logging(name, sys.stderr)
    status = uvloop.run(_host(name, init, directory))
    # All that the process held is closed. Taking the interpreter apart, with torch in it, would last seconds.
    sys.stderr.flush()
    os._exit(status)


async def _host(name: str, init: HostInit, directory: Path) -> int:
    sys.path += [path for path in init.search_path if path not in sys.path]
    keys = None if init.keys_file is None else Keys.load(Path(init.keys_file))
    async with ActorSystem(name, directory, tcp=init.tcp, keys=keys, settings=init.settings) as system:
        system.expect(name)  # starting may last: who calls an actor that is being restarted waits for it
        system.ask_too(init.supervisor["address"])
        supervisor: ActorRef[Any] = system.ref(init.supervisor["name"], init.supervisor["address"])
        try:
            await system.add(_build(init, system), name)
            gc.collect()
            gc.freeze()  # modules and all: what is there now stays, and the collector need not look at it any more
            gc.set_threshold(*_GC_THRESHOLD)
            await supervisor.ask("ready", name, os.getpid(), system.address)
            error = await _until_stopped(system)
        except Exception as raised:  # noqa: BLE001  # supervision: whatever it is, the parent is told and the process ends
            error = raised
        if error is None:
            return 0
        text = "".join(traceback.format_exception(error))
        log.error("actor failed", error=text)
        await supervisor.ask("failed", name, f"{type(error).__name__}: {text_of(error)}", text)
        return 1


def import_path(actor_class: type[Actor] | str) -> str:
    """``module:Class``. Raises LocalProtocolError where another process could not import it."""
    if isinstance(actor_class, str):
        return actor_class
    module, name = actor_class.__module__, actor_class.__qualname__
    if module == "__main__":
        main = sys.modules["__main__"]
        if main.__spec__ is not None:  # python -m
            module = main.__spec__.name
        elif (program := _main_file()) is not None:
            module = program.stem
    if module == "__main__" or "<locals>" in name:
        where = "at a prompt" if module == "__main__" else "inside a function"
        raise LocalProtocolError(
            f"{name} is defined {where}, where no other process can import it: move it to a module"
        )
    return f"{module}:{name}"


def search_path() -> list[str]:
    """Where another process finds what this one has imported, the main program included."""
    paths = [path for path in sys.path if path]
    program = _main_file()
    if program is not None and str(program.parent) not in paths:
        paths.append(str(program.parent))
    return paths


def _main_file() -> Path | None:
    """None at a prompt, and where the program was imported as a module (``python -m``)."""
    main = sys.modules["__main__"]
    file: str | None = getattr(main, "__file__", None)
    return None if file is None or main.__spec__ is not None else Path(file).resolve()


def import_class(path: str) -> type[Actor]:
    """What ``module:Class`` names. Raises ImportError, AttributeError, and TypeError where it is no actor's class."""
    module, _, name = path.partition(":")
    found: Any = attrgetter(name)(importlib.import_module(module))
    if not (isinstance(found, type) and issubclass(found, Actor)):
        raise TypeError(f"{path} is no Actor")
    return found


def _build(init: HostInit, system: ActorSystem) -> Actor:
    actor_class: Any = import_class(init.actor_class)
    constructor = signature_of(actor_class, "__init__") or NO_ARGUMENTS
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


def _end_with_parent(directory: Path, name: str, private: bool) -> NoReturn:
    """Runs in a thread of its own: a loop that is busy importing would notice seconds later."""
    os.read(sys.stdin.fileno(), 1)  # nothing is written after the init: this returns when the pipe is closed
    # The launcher can't clean up any more, so every orphan does; there is nobody left to reply to.
    if private:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        Path(ipc_address(directory, name).removeprefix("ipc://")).unlink(missing_ok=True)
    os._exit(1)


if __name__ == "__main__":
    main()
