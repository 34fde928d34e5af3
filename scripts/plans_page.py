"""Writes the plans of launch/docs/gpus.md: the answers of the commands that stand there, for machines that are made up.

    python scripts/plans_page.py           writes the page
    python scripts/plans_page.py --check   exits with 1 if the page is another one than it would write

A plan is a block that begins with ``$ flexmarl train``; its config is a block of YAML whose first line is a comment
with the name of its file. All other text of the page is written by hand.
"""

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from flexmarl.launch.cli.main import main as flexmarl

PAGE: Final = Path(__file__).parents[1] / "launch" / "docs" / "gpus.md"

_CONFIG: Final = re.compile(r"```yaml\n# (\S+\.yaml)\n(.*?)```", re.DOTALL)
_PLAN: Final = re.compile(r"(```console\n\$ flexmarl (train .*? --on .*?)\n).*?(```)", re.DOTALL)


def rendered(page: str) -> str:
    """The page with the answers of its commands."""
    with TemporaryDirectory(prefix="flexmarl-plans-") as name, contextlib.chdir(name):
        for file, text in _CONFIG.findall(page):
            Path(file).write_text(text, encoding="utf-8")
        return _PLAN.sub(lambda block: f"{block[1]}{answer(block[2])}{block[3]}", page)


def answer(command: str) -> str:
    """Standard output and standard error of a command without the name of its program."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        flexmarl(shlex.split(command))
    return text.getvalue()


def main(arguments: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    current = rendered(page)
    if arguments == ["--check"]:
        if page != current:
            print(f"{PAGE} is not what the plan gives: run python scripts/plans_page.py", file=sys.stderr)
        return int(page != current)
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    PAGE.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
