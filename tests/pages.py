"""README.md and the pages under launch/docs: their code blocks and tables."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .checkouts import PACKAGE

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "launch" / "docs"
PAGES = {path.name: path for path in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]}

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# ([\w./-]+\.(?:py|yaml))\n")


@dataclass(frozen=True)
class Block:
    """A code block. ``file``: its name, empty if it has none."""

    page: str
    line: int
    language: str
    text: str

    @property
    def file(self) -> str:
        name = _FILE.match(self.text) if self.language in ("python", "yaml") else None
        return name[1] if name else ""

    @property
    def is_of_package(self) -> bool:
        """The page adds the file to the package."""
        return self.file.partition("/")[0] in PACKAGE

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> Iterator[Block]:
    """The code blocks of a page, in its order."""
    text = PAGES[page].read_text()
    for match in _BLOCK.finditer(text):
        yield Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2])


def of_language(*languages: str) -> list[Block]:
    """The code blocks of these languages, of all pages."""
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


def tables(page: str) -> Iterator[tuple[str, list[str]]]:
    """The rows of a page's tables, each with the heading that it is under."""
    heading = ""
    for line in PAGES[page].read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|") and not re.match(r"\|[-|: ]+\|$", line):
            yield heading, [cell.strip() for cell in line.strip("|").split(" | ")]
