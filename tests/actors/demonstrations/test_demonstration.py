"""Files of demonstrations: the lines that are read, and those that are refused with their number."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.demonstrations.demonstration import (
    Demonstration,
    demonstration_line,
    read_demonstrations,
)
from flexmarl.actors.errors import RecipeError

WHOLE = st.characters(exclude_categories=["Cs"])  # no halves of surrogates
AGENTS = ("planner", "executor")
LINE = {"query": "a > b", "actions": {"planner": ["UL", "LU"], "executor": ["U"]}}


def read(folder: Path, *lines: Any) -> dict[str, Demonstration]:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "walks.jsonl").write_text("\n".join(texts))
    return read_demonstrations("walks.jsonl", folder, AGENTS)


def test_a_line_is_a_demonstration_with_its_place(tmp_path: Path) -> None:
    found = read(tmp_path, LINE, "", {"query": "c", "actions": {"executor": ["D"]}})
    assert found == {
        "a > b": Demonstration(
            {"planner": ("UL", "LU"), "executor": ("U",)}, f"{tmp_path / 'walks.jsonl'}, line 1"
        ),
        "c": Demonstration({"executor": ("D",)}, f"{tmp_path / 'walks.jsonl'}, line 3"),
    }


def test_a_file_is_also_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "walks.jsonl").write_text(json.dumps(LINE))
    monkeypatch.chdir(tmp_path)
    assert [*read_demonstrations("walks.jsonl", tmp_path / "recipe", AGENTS)] == ["a > b"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([1], "has list: needs"),
        ({}, "has no key: needs"),
        ({"query": "c"}, "has query: needs"),
        ({**LINE, "reward": 1.0}, "has query, actions, reward: needs"),
        (
            {"query": "c", "actions": {"planner": ["\ud83d"]}},
            "actions.planner.0. is .*half of a surrogate pair",
        ),
        ({**LINE, "query": 7}, "query is int, needs the text of the query"),
        ({"query": "c", "actions": {}}, "actions has no agent"),
        ({"query": "c", "actions": ["U"]}, "actions has no agent"),
        (
            {"query": "c", "actions": {"plannr": ["U"]}},
            r"agent 'plannr' is not in the config; it has: planner, executor; do you mean planner\?",
        ),
        ({"query": "c", "actions": {"planner": []}}, "actions.planner needs a list of texts"),
        ({"query": "c", "actions": {"planner": "UL"}}, "actions.planner needs a list of texts"),
        (
            {"query": "c", "actions": {"planner": ["U", ""]}},
            "actions.planner needs a list of texts, none of them empty",
        ),
        ({"query": "c", "actions": {"planner": ["U", 1]}}, "actions.planner needs a list of texts"),
        (LINE, r"the query 'a > b' has a demonstration already, in .*walks.jsonl, line 1"),
    ],
)
def test_a_line_that_is_none_is_refused_by_its_number(tmp_path: Path, line: Any, problem: str) -> None:
    with pytest.raises(RecipeError, match=rf"walks\.jsonl, line 2: {problem}"):
        read(tmp_path, LINE, line)


@given(
    st.dictionaries(
        st.text(WHOLE),
        st.dictionaries(
            st.sampled_from(AGENTS), st.lists(st.text(WHOLE, min_size=1), min_size=1), min_size=1
        ),
        min_size=1,
    )
)
def test_lines_that_are_written_are_read_as_they_were(walks: dict[str, dict[str, list[str]]]) -> None:
    with TemporaryDirectory() as folder:
        found = read(Path(folder), *(demonstration_line(query, actions) for query, actions in walks.items()))
    assert {
        query: {agent: [*texts] for agent, texts in one.actions.items()} for query, one in found.items()
    } == walks


def test_a_text_may_hold_other_ends_of_lines(tmp_path: Path) -> None:
    line = json.dumps({"query": "a\u2028b", "actions": {"planner": ["U\x85"]}}, ensure_ascii=False)
    assert read(tmp_path, line)["a\u2028b"].actions == {"planner": ("U\x85",)}


def test_a_file_that_is_missing_or_has_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"rollout.demonstrations.file=walks.jsonl: there is no such file in"
    ):
        read_demonstrations("walks.jsonl", tmp_path, AGENTS)
    with pytest.raises(RecipeError, match="has no demonstration: write one a line"):
        read(tmp_path, "", " ")
    (tmp_path / "walks.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(RecipeError, match="can't be read as text"):
        read_demonstrations("walks.jsonl", tmp_path, AGENTS)
