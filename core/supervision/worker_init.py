"""The first message to a spawned process: its actor's class and arguments, the addresses and keys that it needs."""

import functools
import importlib
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgpack
from pydantic import TypeAdapter

from ..actor import Actor
from ..errors import LocalProtocolError
from ..protocol import codec
from ..protocol.session import Settings
from ..telemetry import LogLevel
from ..wire.zeromq import Tcp

if TYPE_CHECKING:
    from .node import Launch

# The input stays open as long as the parent lives, so its end can't be the end of the message.
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class WorkerInit:
    """``actor_class``: ``module:Class``. ``args``, ``kwargs``: for its constructor, checked against its annotations.

    ``tcp``: the way to listen, without its keys, which are in ``keys_file``; None: an ipc socket.
    ``epoch``: of its incarnation, one more than the last one's. ``search_path``: further entries for ``sys.path``.
    ``log_level``: the least one of its log's lines.
    """

    actor_class: str
    args: list[Any]
    kwargs: dict[str, Any]
    supervisor: dict[str, str]
    tcp: Tcp | None
    keys_file: str | None
    settings: Settings
    epoch: int
    search_path: list[str]
    log_level: LogLevel

    @classmethod
    def of(
        cls,
        launch: "Launch",
        settings: Settings,
        *,
        tcp: Tcp | None = None,
        keys_file: str | None = None,
        search_path: Sequence[str] = (),
    ) -> "WorkerInit":
        """The first message to the process of ``launch``, whose system has ``settings``."""
        name, address = launch.supervisor
        return cls(
            actor_class=launch.actor_class,
            args=launch.args,
            kwargs=launch.kwargs,
            supervisor={"name": name, "address": address},
            tcp=tcp,
            keys_file=keys_file,
            settings=settings,
            epoch=launch.epoch,
            search_path=list(search_path),
            log_level=launch.log_level,
        )


def write_init(init: WorkerInit) -> bytes:
    """The bytes that ``read_init`` reads: the length of the message, and the message. Raises LocalProtocolError if the
    actor's arguments can't be sent."""
    body = codec.Encoder().pack(init)
    return _LENGTH.pack(len(body)) + body


def read_init(stream: BinaryIO) -> WorkerInit:
    """Reads the parent's message. Raises EOFError if the parent ended before it had written all of it."""
    header = stream.read(_LENGTH.size)
    size_bytes = _LENGTH.unpack(header)[0] if len(header) == _LENGTH.size else 0
    body = stream.read(size_bytes)
    if not size_bytes or len(body) < size_bytes:
        raise EOFError
    return _adapter().validate_python(msgpack.unpackb(body, strict_map_key=False))


@functools.cache
def _adapter() -> TypeAdapter[WorkerInit]:
    return TypeAdapter(WorkerInit)


def constructor_arguments(setup: object) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of an actor's constructor: a mapping holds them by name, any other value is the only one."""
    if setup is None:
        return [], {}
    return ([], dict(setup)) if isinstance(setup, Mapping) else ([setup], {})


def import_path(actor_class: type[Actor] | str) -> str:
    """``module:Class``. Raises LocalProtocolError if another process could not import it."""
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
        place = "at a prompt" if module == "__main__" else "inside a function"
        raise LocalProtocolError(
            f"{name} is defined {place}, and no other process can import it: move it to a module"
        )
    return f"{module}:{name}"


def search_path() -> list[str]:
    """The directories from which another process can import this one's modules, the main program included; also the
    working directory, if this process imports from there, as at a prompt."""
    paths = [path or str(Path.cwd()) for path in sys.path]
    program = _main_file()
    if program is not None and str(program.parent) not in paths:
        paths.append(str(program.parent))
    return paths


def _main_file() -> Path | None:
    """The file of the main program; None at a prompt, and for a module (``python -m``)."""
    main = sys.modules["__main__"]
    file: str | None = getattr(main, "__file__", None)
    return None if file is None or main.__spec__ is not None else Path(file).resolve()


def import_class(path: str) -> type[Actor]:
    """The class ``module:Class``. Raises ImportError, AttributeError, and TypeError if it is not an Actor."""
    # A name that is imported, and so could run any code: it comes from the supervisor's process, over standard input or
    # from a node's supervisor, and is never part of a peer's request to this actor.
    module, _, name = path.partition(":")
    actor_class: Any = attrgetter(name)(importlib.import_module(module))
    if not (isinstance(actor_class, type) and issubclass(actor_class, Actor)):
        raise TypeError(f"{path} is not a subclass of Actor")
    return actor_class
