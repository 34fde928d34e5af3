"""Makes the pictures of launch/docs: the page of the tutorial's run, as a headless Chromium shows it.

    .venv/bin/python scripts/docs_pictures.py     about a minute; writes launch/docs/pictures

The run is a real one: the files and the first two commands of launch/docs/tutorial.md, in a folder of its own. Pictures
are taken again when the page's look changes; no test compares them, since a run's figures differ with each machine.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PICTURES: Final = ROOT / "launch" / "docs" / "pictures"
PANELS: Final = {
    "learning": (1200, 720),
    "trajectories": (1200, 760),
    "timeline": (1200, 620),
}
"""The panels that are shown, with width and height in pixels."""

_TUTORIAL: Final = ROOT / "launch" / "docs" / "tutorial.md"
_FILE: Final = re.compile(r"^```(?:python|yaml)\n(# (cup/[\w./-]+)\n.*?)^```$", re.MULTILINE | re.DOTALL)
_RUN_S: Final = 600
_PICTURE_S: Final = 300
_REMOVAL_S: Final = 30.0


def train(folder: Path) -> Path:
    """Trains the tutorial's recipe in ``folder``. Returns the run's folder."""
    commands, files = tutorial(_TUTORIAL.read_text())
    _flexmarl(folder, commands[0])
    for name, content in files.items():
        (folder / name).write_text(content)
    _flexmarl(folder, commands[1])
    return folder / "runs" / "first"


def tutorial(text: str) -> tuple[tuple[list[str], list[str]], dict[str, str]]:
    """The arguments of the commands that make the recipe and train it, and its files."""
    commands = [shlex.split(line) for line in re.findall(r"^\$ flexmarl (.*)$", text, re.MULTILINE)]
    begin = next(words for words in commands if words[0] == "new")
    training = next(words for words in commands if words[0] == "train" and "first" in words)
    return (begin, training), {name: content for content, name in _FILE.findall(text)}


def _flexmarl(folder: Path, words: list[str]) -> None:
    code = "import sys; from flexmarl.launch.cli.main import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts" / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-P", "-c", code, *words], cwd=folder, env=environment, check=True, timeout=_RUN_S
    )


@contextmanager
def _short_folder() -> Iterator[str]:
    """A folder for Chromium's files. Its path is short, as that of a socket must be, and its removal is repeated until
    the last of Chromium's processes writes no more."""
    folder = tempfile.mkdtemp(prefix="cr-")
    try:
        yield folder
    finally:
        deadline = time.monotonic() + _REMOVAL_S
        while Path(folder).exists() and time.monotonic() < deadline:
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.05)


def take(report: Path, folder: Path, chromium: str, panels: Mapping[str, tuple[int, int]] = PANELS) -> None:
    """Writes a picture of each panel of a report to ``folder``. Raises RuntimeError if Chromium made none."""
    folder.mkdir(parents=True, exist_ok=True)
    with _short_folder() as home:
        variables = ("HOME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
        environment = {**os.environ, **dict.fromkeys(variables, home)}
        for panel, (width, height) in panels.items():
            picture = folder / f"{panel}.png"
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
            options += [f"--user-data-dir={home}/profile", f"--window-size={width},{height}"]
            # Virtual time: the picture is taken when the page's scripts have nothing left to do.
            options += ["--virtual-time-budget=10000", f"--screenshot={picture}"]
            done = subprocess.run(
                [chromium, *options, f"{report.absolute().as_uri()}#{panel}"],
                env=environment,
                capture_output=True,
                text=True,
                timeout=_PICTURE_S,
                check=False,
            )
            if done.returncode or not picture.exists():
                raise RuntimeError(f"Chromium made no picture of {panel}: {done.stderr}")


def main() -> int:
    chromium = shutil.which("chromium")
    if chromium is None:
        print("chromium is missing: on Debian, apt-get install chromium", file=sys.stderr)
        return 1
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        take(train(Path(folder)) / "report.html", PICTURES, chromium)
    for picture in sorted(PICTURES.glob("*.png")):
        print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size // 1000} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
