"""The recorded run that ``flexmarl page --demo`` shows: 60 steps of the recipe sort-digits, two policies on one slot.

``scripts/demo_run.py`` records it.
"""

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

ARCHIVE: Final = Path(__file__).with_name("demo_run.tar.gz")
NAME: Final = "demo"
PACKAGE: Final = Path(__file__).resolve().parents[3]
"""The folder of the layers."""

PACKAGE_MARK: Final = "{flexmarl}"
"""Stands in the recorded config for the folder of the recipe and its tokenizer."""


@contextmanager
def unpacked_demo() -> Iterator[Path]:
    """The folder of the recorded run while it is entered."""
    with TemporaryDirectory(prefix="flexmarl-demo-") as folder:
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
        config = Path(folder) / NAME / "config.yaml"
        config.write_text(config.read_text().replace(PACKAGE_MARK, str(PACKAGE)))
        yield Path(folder) / NAME
