"""Steps the wall clock of processes while they run, as an administrator or a time server does.

    clock = SteppingClock(folder)
    subprocess.Popen(..., env=clock.environment(os.environ))
    clock.step(-3600.0)         # an hour back, within a tenth of a second

Python imports ``sitecustomize`` at the start of a process: the one written here adds an offset, read from a file, to
``time.time`` and ``time.time_ns``. Processes with an odd id are stepped the other way. Clocks that are read elsewhere
(the kernel's for files, monotonic ones) are as they were.
"""

import os
from collections.abc import Mapping
from pathlib import Path

_SITECUSTOMIZE = """
import os
import time
from pathlib import Path

_file = Path(__file__).with_name("offset_s")
_time, _time_ns, _monotonic = time.time, time.time_ns, time.monotonic
_known = [0.0, -1.0]


def _offset_s():
    now = _monotonic()
    if now - _known[1] > 0.1:
        _known[:] = float(_file.read_text()) * (-1 if os.getpid() % 2 else 1), now
    return _known[0]


time.time = lambda: _time() + _offset_s()
time.time_ns = lambda: _time_ns() + int(_offset_s() * 1e9)
"""


class SteppingClock:
    def __init__(self, folder: Path) -> None:
        """``folder``: a new one is made in it."""
        self._folder = folder / "stepping_clock"
        self._folder.mkdir()
        self.step(0.0)
        (self._folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The same for processes whose clock steps."""
        path = [str(self._folder), *filter(None, [environment.get("PYTHONPATH")])]
        return {**environment, "PYTHONPATH": os.pathsep.join(path)}

    def step(self, offset_s: float) -> None:
        """From now on the clock is ahead of the real one by this."""
        temporary = self._folder / "offset_s.tmp"
        temporary.write_text(repr(offset_s))
        temporary.rename(self._folder / "offset_s")
