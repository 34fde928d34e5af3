"""launch/docs/game.md: a whole game is as short as its title says. The page itself is run by test_docs.py."""

import re

from .checkouts import ROOT

PAGE = (ROOT / "launch" / "docs" / "game.md").read_text()


def test_the_files_of_the_game_have_at_most_sixty_lines() -> None:
    files = re.findall(r"^```(?:python|yaml)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    lines = sum(len(file.splitlines()) for file in files)
    assert len(files) == 2 and lines <= 60
    assert f"That was all: {lines} lines." in PAGE


def test_the_game_has_all_that_the_page_promises() -> None:
    for part in (
        "tools=[price]", "policy: player", "train: false", "sft:", "def sft", "flexmarl new auction --like chat",
        "for seed in 0 1", "flexmarl eval", "flexmarl export",
    ):  # fmt: skip
        assert part in PAGE
