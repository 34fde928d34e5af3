"""Throw-away copies of the package, with the changes that a page of the docs shows."""

import re
import shutil
import subprocess
from pathlib import Path

from .patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
PACKAGE = ("core", "transport", "actors", "launch")

_CHANGE = re.compile(r"^```diff\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NEW_FILE = re.compile(
    rf"^```python\n# ((?:{'|'.join(PACKAGE)})/\S+\.py)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)


def new_files(page: Path) -> dict[str, str]:
    """The files that ``page`` adds to the package, by their paths in it."""
    return dict(_NEW_FILE.findall(page.read_text()))


def changes(page: Path) -> list[str]:
    """The changes of files of the package that ``page`` shows, as unified diffs."""
    return _CHANGE.findall(page.read_text())


def changed_files(page: Path) -> set[str]:
    """The paths of all files in the package that ``page`` adds or changes."""
    return {*new_files(page), *re.findall(r"^\+\+\+ b/(\S+)$", "".join(changes(page)), re.MULTILINE)}


def changed_checkout(page: Path, folder: Path) -> Path:
    """Copies the package to ``folder``, and makes the changes of ``page`` there. ``folder/scripts/src`` is the path to
    import it from. Raises CalledProcessError if a change does not fit the present files."""
    shutil.copytree(ROOT / "scripts" / "src", folder / "scripts" / "src", symlinks=True)
    for name in PACKAGE:
        # With its bytecode, which is valid beside copies of the same age: each process would compile the package again.
        shutil.copytree(ROOT / name, folder / name)
    for name, text in new_files(page).items():
        assert not (folder / name).exists(), f"{page.name} adds {name}, which exists"
        (folder / name).write_text(text)
    for change in changes(page):
        subprocess.run(
            ["git", "apply", "-"], input=change, cwd=folder, text=True, timeout=PATIENCE_S, check=True
        )
    return folder
