"""The page of a run in a headless Chromium: its first paint, the time until the tiles of the first panel are there, and
the frames a second of a timeline that is zoomed.

Chromium is driven by ``page_paint.mjs`` with the modules of the page's tests, which ``.ci/run`` installs.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

MODULES: Final = Path(__file__).parents[2] / ".cache" / "browser"
_SCRIPT: Final = Path(__file__).with_name("page_paint.mjs")
_FOLDERS: Final = ("HOME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
"""Variables that name the folders in which Chromium leaves files."""

_PAGE_S: Final = 120
_BROWSER_S: Final = 4 * _PAGE_S


def missing_parts() -> list[str]:
    """The parts that a browser's visit needs and this machine lacks."""
    parts = {
        "chromium": shutil.which("chromium"),
        "node": shutil.which("node"),
        str(MODULES): (MODULES / "node_modules" / "playwright-core").is_dir(),
    }
    return [name for name, is_there in parts.items() if not is_there]


def paint_times(address: str) -> dict[str, float]:
    """Seconds from the begin of the navigation to ``address``: ``first_paint_s`` and ``tiles_s`` of the first visit,
    ``tiles_again_s`` of the second. ``frames_per_s`` of a timeline that is zoomed and panned for six seconds, and
    ``slow_frame_ms``, which nine of ten frames do not take. Raises RuntimeError with the words of Chromium if it can't
    show the page, subprocess.TimeoutExpired if it does not end."""
    chromium, node = shutil.which("chromium"), shutil.which("node")
    assert chromium and node, "missing_parts was asked"
    # A short path: that of a socket in it may have a hundred characters.
    with TemporaryDirectory(prefix="cr-", ignore_cleanup_errors=True) as home:
        done = subprocess.run(
            [node, str(_SCRIPT), str(MODULES), f"{home}/profile", address],
            env={
                **os.environ,
                **dict.fromkeys(_FOLDERS, home),
                "FLEXMARL_CHROMIUM": chromium,
                "FLEXMARL_PATIENCE_MS": str(1000 * _PAGE_S),
            },
            capture_output=True,
            text=True,
            timeout=_BROWSER_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"Chromium could not show the page {address}: {done.stderr.strip()}")
    first, second, frames = json.loads(done.stdout)
    return {
        "first_paint_s": first["paint"] / 1000,
        "tiles_s": first["tiles"] / 1000,
        "tiles_again_s": second["tiles"] / 1000,
        "frames_per_s": frames["perSecond"],
        "slow_frame_ms": frames["slow"],
    }
