"""The plans in the page of GPUs are those that the command prints."""

from pathlib import Path

import pytest

from scripts import plans_page


def test_the_page_is_what_the_plan_gives(capsys: pytest.CaptureFixture[str]) -> None:
    assert plans_page.main(["--check"]) == 0, capsys.readouterr().err


def test_another_plan_is_found_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "gpus.md"
    text = "before\n```console\n$ flexmarl train nowhere.yaml --on 1x1x80GiB\nold\n```\nafter\n"
    page.write_text(text)
    monkeypatch.setattr(plans_page, "PAGE", page)
    assert plans_page.main(["--check"]) == 1 and page.read_text() == text
    assert plans_page.main([]) == 0
    written = page.read_text()
    assert "nowhere.yaml can't be read" in written and "old" not in written
    assert written.startswith("before\n```console\n$ flexmarl") and written.endswith("```\nafter\n")
