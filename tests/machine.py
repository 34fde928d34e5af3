"""The machine that the tests run on stays as it is: a test that would change it fails.

Three fences, for none of them sees everything:

- Stand-ins come first in ``PATH``, for the programs that install packages or run services. A call from any process,
  such as a script that a test runs, ends with an error and leaves a record. ``python -m pip`` calls its stand-in too
  (``PIP_PYTHON``).
- An audit hook (PEP 578) refuses what this process and its forks do outside the checkout and the session's folders: to
  write, to rename, to remove, and to start those programs by their paths. It sees no file of another process.
- ``HOME`` and the folders of freedesktop.org are the session's, also in other processes.

Nothing is compared before and after: other programs may work on the machine at the same time.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from .leftovers import LeftoversPlugin, runs_tests, session_folder

_CHECKOUT = Path(__file__).parents[1]
_PROGRAMS = {
    "apk", "apt", "apt-get", "aptitude", "brew", "conda", "dnf", "dpkg", "flatpak", "gem", "mamba", "npm", "npx",
    "pacman", "pip", "pip3", "pipx", "pnpm", "rpm", "snap", "uv", "yarn", "yum", "zypper",
    "doas", "service", "su", "sudo", "systemctl",
}  # fmt: skip
_STAND_IN = """\
#!/bin/sh
name=${0##*/}
[ "$name" = pip ] && shift # pip gives its own path to the Python that PIP_PYTHON names
echo "$PYTEST_CURRENT_TEST: $name $*" >> '{records}'
echo "a test may not change the machine: $name $*" >&2
exit 97
"""
# Settings of programs in the user's HOME, and the variables by which they still find them.
_SETTINGS = {
    ".gitconfig": "GIT_CONFIG_GLOBAL",
    ".pyenv": "PYENV_ROOT",
    ".rustup": "RUSTUP_HOME",
    ".cargo": "CARGO_HOME",
}
_FREEDESKTOP = {"CACHE": ".cache", "CONFIG": ".config", "DATA": ".local/share", "STATE": ".local/state"}
# The arguments of an event that are paths, and those that are the open folders which they are relative to.
_CHANGES: Mapping[str, Sequence[tuple[int, int | None]]] = {
    "open": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.link": ((1, 3),),
    "os.mkdir": ((0, 2),),
    "os.remove": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.rmdir": ((0, 1),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
}
_STARTS = {"subprocess.Popen": 0, "os.exec": 0, "os.posix_spawn": 0, "os.spawn": 1}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def install_wheel(wheel: Path, target: Path) -> None:
    """Installs a wheel alone into a new folder of a test: what tests may use pip for.

    Raises subprocess.CalledProcessError."""
    assert target.is_dir() and not any(target.iterdir()) and not target.is_relative_to(_CHECKOUT)
    words: list[str | Path] = ["install", "--quiet", "--no-index", "--no-deps", "--target", target, wheel]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))
    }
    subprocess.run([sys.executable, "-m", "pip", *words], env=environment, check=True)


class MachineChanged(Exception):
    """A test would change the machine."""


class Fences:
    """Raised when the session begins; they stand while a test runs."""

    def __init__(self) -> None:
        self._folder = Path(session_folder(Path(os.environ["PYTEST_DEBUG_TEMPROOT"])))
        self._records = self._folder / "records"
        self._programs = self._folder / "programs"
        self._home = self._folder / "home"
        self.folders = [str(folder) for folder in (_CHECKOUT, self._folder, tempfile.gettempdir())]
        self.folders.append(os.environ["FLEXMARL_RUNTIME_BASE"])
        self.stand = False
        self._make_stand_ins()
        self._make_home()
        sys.addaudithook(self._refuse)

    def records(self) -> list[str]:
        """The changes since the last call, each with the test that ran: ``test_x.py::test_a (call): apt update``."""
        if not self._records.exists():
            return []
        records = self._records.read_text().splitlines()
        self._records.unlink()
        return records

    def close(self) -> list[str]:
        """Return the changes by processes that outlived their tests, and the files in ``HOME`` but for caches."""
        left = [
            *self.records(),
            *(str(p) for p in sorted(self._home.iterdir()) if p.name != _FREEDESKTOP["CACHE"]),
        ]
        shutil.rmtree(self._folder, ignore_errors=True)
        return left

    def _make_stand_ins(self) -> None:
        self._programs.mkdir()
        stand_in = self._folder / "stand-in"
        stand_in.write_text(_STAND_IN.replace("{records}", str(self._records)))
        stand_in.chmod(0o755)
        for name in _PROGRAMS:
            (self._programs / name).symlink_to(stand_in)
        os.environ["PATH"] = f"{self._programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        os.environ["PIP_PYTHON"] = str(self._programs / "pip")

    def _make_home(self) -> None:
        user = Path.home()
        for name, variable in _SETTINGS.items():
            if (user / name).exists():
                os.environ.setdefault(variable, str(user / name))
        self._home.mkdir()
        os.environ["HOME"] = str(self._home)
        os.environ.update({f"XDG_{name}_HOME": str(self._home / path) for name, path in _FREEDESKTOP.items()})

    def _refuse(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Raises MachineChanged; a record stays, should the test catch the error."""
        if not self.stand:
            return
        if event in _CHANGES:
            if event != "open" or (arguments[2] or 0) & _WRITING:
                for path in self._changed(event, arguments):
                    self._record(f"{event} {path}")
        elif event in _STARTS:
            program = arguments[_STARTS[event]]
            path = os.fsdecode(program) if program is not None else ""
            # A name alone is looked for in PATH, and a stand-in is found.
            if path.startswith("/") and path.rpartition("/")[2] in _PROGRAMS and not self._is_ours(path):
                self._record(path)

    def _changed(self, event: str, arguments: tuple[Any, ...]) -> Iterator[str]:
        """The paths outside the folders that tests may write in."""
        for index, folder in _CHANGES[event]:
            given = arguments[index]
            if isinstance(given, int) or (folder is not None and arguments[folder] != -1):
                continue  # an open file, or within an open folder
            path = os.path.abspath(os.fsdecode(given))  # noqa: PTH100  # called for each file that is opened
            if not self._is_ours(path):
                yield path

    def _is_ours(self, path: str) -> bool:
        if any(path == folder or path.startswith(f"{folder}/") for folder in self.folders):
            return True
        if path.startswith("/dev/"):
            return not path.startswith("/dev/shm/")
        return path.startswith("/proc/") or "__pycache__" in path

    def _record(self, change: str) -> None:
        with self._records.open("a") as records:
            records.write(f"{os.environ.get('PYTEST_CURRENT_TEST')}: {change}\n")
        raise MachineChanged(f"a test may not change the machine: {change}")


class MachinePlugin:
    """Comes after LeftoversPlugin, which sets the folder for temporary files."""

    def __init__(self, config: pytest.Config, leftovers: LeftoversPlugin) -> None:
        self._fences = Fences() if runs_tests(config) else None
        self._leftovers = leftovers

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        if self._fences is not None:
            factory: pytest.TempPathFactory = session.config._tmp_path_factory  # type: ignore[attr-defined]
            self._fences.folders.append(str(factory.getbasetemp()))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        if self._fences is None:
            return (yield)
        self._fences.stand = True
        try:
            return (yield)
        finally:
            self._fences.stand = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if self._fences is not None and (records := self._fences.records()):
            text = "\n".join(("A test would have changed the machine:", *records))
            report.longrepr = f"{report.longreprtext}\n{text}" if report.failed else text
            report.outcome = "failed"
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        if self._fences is not None:
            self._leftovers.add(self._fences.close())
