"""The command that the page adds: two files of the package. The page itself runs it (``test_docs.py``)."""

from pathlib import Path

from ...checkouts import changed_files

PAGE = Path(__file__).parents[3] / "launch" / "docs" / "add-a-command.md"


def test_its_file_and_its_name_are_all() -> None:
    assert changed_files(PAGE) == {"launch/cli/curve.py", "launch/cli/registry.py"}
