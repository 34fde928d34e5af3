"""Writes the tables of launch/docs/metrics.md from the table of figures, actors/figures.py.

    python scripts/metrics_page.py           writes the page
    python scripts/metrics_page.py --check   exits with 1 if the page is another one than it would write

A table stands between ``<!-- figures: <subject> -->`` and ``<!-- end -->``. All other text of the page is written by
hand.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from flexmarl.actors.figures import FAMILIES, FIGURES

PAGE: Final = Path(__file__).parents[1] / "launch" / "docs" / "metrics.md"

_LABELS: Final = {"opponent": "pool"}
_TABLE: Final = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(page: str) -> str:
    """The page with its tables. Raises KeyError for a subject that does not exist."""
    return _TABLE.sub(lambda block: f"{block[1]}{_table(block[2])}{block[3]}", page)


def _table(subject: str) -> str:
    lines = ["| key | unit | meaning |", "|---|---|---|"]
    lines += [f"| {key} | {unit} | {meaning} |" for key, unit, meaning in _rows(subject)]
    return "".join(f"{line}\n" for line in lines)


def _rows(subject: str) -> Iterable[tuple[str, str, str]]:
    if subject == "families":
        return [(f"`{family}/<metric>`", "the metric’s", meaning) for family, meaning in FAMILIES.items()]
    rows = {str(name): rows for name, rows in FIGURES.items()}[subject].values()
    label = "" if subject == "step" else f"/<{_LABELS.get(subject, subject)}>"
    return [(f"`{row.name}{label}`", row.unit, row.meaning) for row in rows]


def main(arguments: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    wanted = rendered(page)
    if arguments == ["--check"]:
        if page != wanted:
            print(
                f"{PAGE} is not what actors/figures.py gives: run python scripts/metrics_page.py",
                file=sys.stderr,
            )
        return int(page != wanted)
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
