"""Programs ``flexmarl`` and ``python`` for a shell, whose processes are forks of a template (``warm_process.py``)."""

import json
import os
import shlex
import socket
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from .patience import PATIENCE_S
from .warm_process import TEMPLATE, Template, WarmProcess

_MAIN: Final = "import sys; from flexmarl.launch.cli.main import main; sys.exit(main())"
# As ``python FILE`` does: the file's folder is the first that modules are searched in.
_SCRIPT: Final = """
import os, sys
del sys.argv[0]
__file__ = sys.argv[0]
sys.path[0] = os.path.dirname(os.path.abspath(__file__))
with open(__file__) as file:
    code = compile(file.read(), __file__, "exec")
exec(code)
"""
_CODES: Final = {"flexmarl": _MAIN, "python": _SCRIPT}
_INTERPRETERS: Final = {"flexmarl": ["-c", _MAIN], "python": []}
# Asks for a fork, and waits for it, or becomes a new interpreter.
_CLIENT: Final = """
import json, os, socket, sys
address, program, *arguments = sys.argv[1:]
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect("\\0" + address)
    request = json.dumps([program, arguments, os.getcwd(), dict(os.environ)])
    socket.send_fds(connection, [request.encode()], [1, 2])
    answer = connection.recv(20) or b"1"
if answer == b"new":
    os.execv(sys.executable, [sys.executable, *json.loads(INTERPRETERS)[program], *arguments])
if int(answer) < 0:
    os.kill(os.getpid(), -int(answer))
sys.exit(int(answer))
"""
_MOST_BYTES: Final = 2**17


@contextmanager
def warm_programs(folder: Path, template: Template = TEMPLATE, new: Collection[str] = ()) -> Iterator[None]:
    """Writes the programs to ``folder``. They ask this process for forks, until the end. ``new``: the commands of
    ``flexmarl``, and ``python``, that run in a new interpreter the first time, as all do in another environment."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # the kernel gives it an abstract address: one in tmp_path may be too long
        listener.listen()
        address = listener.getsockname()[1:].decode()
        client = f"INTERPRETERS = {json.dumps(_INTERPRETERS)!r}\n{_CLIENT}"
        for program in _CODES:
            words = shlex.join([sys.executable, "-IS", "-c", client, address, program])
            (folder / program).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            (folder / program).chmod(0o755)
        thread = threading.Thread(target=_serve, args=(listener, template, set(new)))
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(listener: socket.socket, template: Template, new: set[str]) -> None:
    """Answers each request in a thread of its own, until the listener is shut down."""
    threads = []
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            break
        threads.append(threading.Thread(target=_answer, args=(connection, template, new)))
        threads[-1].start()
    for thread in threads:
        thread.join()


def _answer(connection: socket.socket, template: Template, new: set[str]) -> None:
    """Sends the exit status of a fork when it has ended, or that the program needs a new interpreter."""
    with connection:
        message, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 2)
        try:
            process = _start(json.loads(message), descriptors, template, new)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if process is None:
            connection.send(b"new")
            return
        try:
            connection.send(str(process.wait(PATIENCE_S)).encode())
        finally:
            process.kill()


def _start(
    request: tuple[str, list[str], str, dict[str, str]],
    descriptors: list[int],
    template: Template,
    new: set[str],
) -> WarmProcess | None:
    program, arguments, directory, environment = request
    command = program if program == "python" else next(iter(arguments), "")
    if command in new:
        new.discard(command)
        return None
    return template.start(_CODES[program], arguments, environment, *descriptors, directory=directory)
