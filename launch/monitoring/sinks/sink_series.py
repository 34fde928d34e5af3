"""A sink's series of figures, which a resumed run continues: its name, and the last step and evaluation in it.

runs/<name>/sinks/<sink>.json
"""

import json
from pathlib import Path

from ....core.durable.files import make_private_folder, replace_private
from .sink import Figures


class SinkSeries:
    """``name``: of the series at the service, empty if it is new."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._last: dict[str, int] = {}
        self.name = ""

    def read(self) -> None:
        """Raises OSError, ValueError if the file is damaged."""
        if self._file.exists():
            saved = json.loads(self._file.read_text(encoding="utf-8"))
            self.name, self._last = (
                str(saved["series"]),
                {kind: int(step) for kind, step in saved["last"].items()},
            )

    def has(self, figures: Figures) -> bool:
        """True if the series has the step or evaluation of ``figures`` already: a resumed run repeats steps."""
        return figures.step <= self._last.get(figures.kind, -1)

    def named(self, name: str) -> None:
        """Notes the series' name at the service, on the disk too."""
        self.name = name
        self._write()

    def written(self, figures: Figures) -> None:
        """Notes that ``figures`` are in the series, on the disk too."""
        self._last[figures.kind] = figures.step
        self._write()

    def _write(self) -> None:
        make_private_folder(self._file.parent)
        line = json.dumps({"series": self.name, "last": self._last}) + "\n"
        replace_private(self._file, line.encode())
