"""A command in the background of a server of SWE-ReX. This file is sent there as text: it needs Python's library alone.

    begin ─> a runner in a session of its own ─> the command ─> its end, in the folder
      end: kills the runner and all that it has started; removes the folder

The server computes one request at a time and hears nothing meanwhile; so each of these ends soon.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_KEPT = 64 << 10
_LOOK_S = 0.01
_WATCH_S = 1.0


def begin(folder: Path, limit_s: float, command: list[str]) -> None:
    """Starts the command in ``folder/files``, by a runner that ends with the server."""
    server = os.getppid()
    (folder / "files").mkdir(exist_ok=True)
    runner = os.fork()
    if not runner:
        try:
            os.setsid()
            _leave_streams()
            _write_end(folder, _end_of(folder, limit_s, command, server))
        finally:
            os.killpg(0, signal.SIGKILL)  # what the command has left, and itself
    while os.getpgid(runner) != runner:
        time.sleep(_LOOK_S)
    (folder / "runner").write_text(str(runner))


def _leave_streams() -> None:
    """The server waits for the end of its pipes."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)


def _end_of(folder: Path, limit_s: float, command: list[str], server: int) -> dict[str, object]:
    deadline = time.monotonic() + limit_s
    paths = folder / "stdout", folder / "stderr"
    with paths[0].open("wb") as stdout, paths[1].open("wb") as stderr:
        try:
            process = subprocess.Popen(
                command, cwd=folder / "files", stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
            )
        except (OSError, ValueError) as error:
            return {"problem": f"{type(error).__name__}: {error}"}
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                status = process.wait(min(left_s, _WATCH_S))
            except subprocess.TimeoutExpired:
                os.kill(server, 0)  # raises if it has ended: so does this runner
            else:
                return {"status": status, "stdout": _tail(paths[0]), "stderr": _tail(paths[1])}
    return {"overran": True}


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _KEPT))
        return file.read().decode(errors="replace")


def _write_end(folder: Path, end: dict[str, object]) -> None:
    partial = folder / "end.partial"
    partial.write_text(json.dumps(end))
    partial.replace(folder / "end")


def look(folder: Path, wait_s: float) -> dict[str, object]:
    """The end of the command, if it comes within ``wait_s``; else nothing."""
    deadline = time.monotonic() + wait_s
    while not (folder / "end").exists():
        if time.monotonic() >= deadline:
            return {}
        time.sleep(_LOOK_S)
    end: dict[str, object] = json.loads((folder / "end").read_text())
    return end


def end(folder: Path) -> None:
    """Ends the command, if it runs, with all that it has started; removes the folder."""
    with suppress(FileNotFoundError, ProcessLookupError):
        os.killpg(int((folder / "runner").read_text()), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def main(words: list[str]) -> None:
    """``begin FOLDER LIMIT_S WAIT_S COMMAND...`` or ``end FOLDER``; writes an object."""
    name, folder, answer = words[0], Path(words[1]), {}
    if name == "begin":
        begin(folder, float(words[2]), words[4:])
        answer = look(folder, float(words[3]))
    else:
        end(folder)
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
