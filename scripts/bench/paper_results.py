"""The results of simulations in a file: a line of JSON for each case, with a digest of the code that has played it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from .paper_cases import Case

_ROOT: Final = Path(__file__).parents[2]
_FOLDERS: Final = ("core", "transport", "actors", "launch")
_SUFFIXES: Final = (".py", ".yaml")


@dataclass(frozen=True, slots=True)
class Row:
    """``figures``: see ``Summary``. ``code``: see ``code_digest``."""

    case: Case
    code: str
    figures: Mapping[str, float]

    def line(self) -> str:
        case = self.case
        of_case = {"scenario": case.scenario, "mode": case.mode, "seed": case.seed}
        return json.dumps(
            {**of_case, "overrides": case.overrides, "code": self.code, "figures": self.figures}
        )

    @classmethod
    def of_line(cls, line: str) -> "Row":
        """Raises ValueError or KeyError for a line of another file."""
        raw: dict[str, Any] = json.loads(line)
        case = Case(raw["scenario"], raw["mode"], raw["seed"], tuple(raw["overrides"]))
        return cls(case, raw["code"], raw["figures"])


class Results:
    """Those of ``file``, which each new one is written to; without a file, in memory."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        lines = file.read_text().splitlines() if file is not None and file.is_file() else []
        self._rows = {row.case: row for row in map(Row.of_line, lines)}

    @property
    def rows(self) -> Sequence[Row]:
        """All, also those of other code, in the order of their cases."""
        return [self._rows[case] for case in sorted(self._rows)]

    def row(self, case: Case) -> Row | None:
        """None if the case has no result, or other code has played it."""
        row = self._rows.get(case)
        return row if row is not None and row.code == code_digest() else None

    def add(self, case: Case, figures: Mapping[str, float]) -> Row:
        """The case has just been played."""
        row = self._rows[case] = Row(case, code_digest(), figures)
        if self._file is not None:
            # Whole and then renamed: ctrl-C comes at any time, and the next command reads it.
            part = self._file.with_suffix(".part")
            part.write_text("".join(f"{kept.line()}\n" for kept in self.rows))
            part.replace(self._file)
        return row


@cache
def code_digest() -> str:
    """Digest of all files that decide a result."""
    digest = hashlib.sha256()
    files = (file for folder in _FOLDERS for file in (_ROOT / folder).rglob("*") if file.suffix in _SUFFIXES)
    for file in sorted(files):
        digest.update(str(file.relative_to(_ROOT)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
