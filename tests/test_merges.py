"""No tracked file has the marks of a merge that was left unfinished."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MARK = re.compile(rb"^(<{7} .*|\|{7} .*|={7}|>{7} .*)\r?$", re.MULTILINE)


def marks(content: bytes) -> list[bytes]:
    """The lines that git writes. A line of ``=`` alone may underline a title, unless another mark is there too."""
    found = [match.group(1) for match in MARK.finditer(content)]
    return found if any(line != b"=" * 7 for line in found) else []


def test_tracked_files_have_no_marks() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("the tests are not in a git checkout")
    files = [ROOT / name.decode() for name in listed.stdout.split(b"\0") if name]
    assert len(files) > 100
    marked = {str(file): found for file in files if file.is_file() and (found := marks(file.read_bytes()))}
    assert not marked


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"a\n" + b"<" * 7 + b" HEAD\nb\n", 1),
        (b"<" * 7 + b" HEAD\r\na\r\n" + b"=" * 7 + b"\r\n" + b">" * 7 + b" main\r\n", 3),
        (b"a\n" + b">" * 7 + b" c7cd4fd (Words)", 1),
        (b"A title\n" + b"=" * 7 + b"\n", 0),
        (b"x = '<<<<<<< HEAD'\n", 0),
    ],
)
def test_marks_are_found(content: bytes, found: int) -> None:
    assert len(marks(content)) == found
