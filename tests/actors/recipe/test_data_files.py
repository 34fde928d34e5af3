"""Queries from files: rows, epochs, and mistakes with the file and the row."""

import json
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.errors import RecipeError
from flexmarl.actors.messages import Query
from flexmarl.actors.recipe.data_files import DataFiles
from flexmarl.actors.recipe.recipe import Recipe, RecipeConfig

ROWS = [{"question": f"{n}+1", "answer": n + 1, "level": n % 2} for n in range(5)]


def write_lines(file: Path, rows: list[Any]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_lines(tmp_path / "train.jsonl", ROWS)
    write_lines(tmp_path / "held_out.jsonl", ROWS[:2])
    return tmp_path


DATA = {"train": "train.jsonl", "eval": "held_out.jsonl", "prompt": "question"}


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(folder: Path) -> None:
    files = DataFiles(folder, DATA)
    epochs = [[files.train_query(5 * epoch + place, seed=3) for place in range(5)] for epoch in range(4)]
    for queries in epochs:
        assert sorted(query.text for query in queries) == [row["question"] for row in ROWS]
        assert all(query.data["answer"] == int(query.text[0]) + 1 for query in queries)
        assert all("level" in query.data for query in queries)
    texts = [[query.text for query in queries] for queries in epochs]
    assert len({tuple(order) for order in texts}) > 1, "one order an epoch"
    assert len({query.id for queries in epochs for query in queries}) == 20
    assert DataFiles(folder, DATA).train_query(13, seed=3) == epochs[2][3], "a function of position and seed"
    assert [files.train_query(n, seed=4).text for n in range(5)] != texts[0]


def test_rows_may_keep_their_order(folder: Path) -> None:
    files = DataFiles(folder, {**DATA, "shuffle": False, "answer": "level"})
    assert files.train_query(7, seed=0) == Query("2/1", "2+1", {**ROWS[2], "answer": 0})
    assert [query.id for query in files.eval_queries(0)] == ["eval-0", "eval-1"]


def test_parquet_has_the_same_rows(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs flexmarl[datasets]")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "train.parquet")
    of_lines, of_table = DataFiles(folder, DATA), DataFiles(folder, DATA | {"train": "train.parquet"})
    assert [of_table.train_query(n, 1) for n in range(9)] == [of_lines.train_query(n, 1) for n in range(9)]


WORKFLOW = "async def workflow(query, agents): ...\n"


def test_a_recipe_without_data_code_takes_the_files(folder: Path) -> None:
    (folder / "workflow.py").write_text(WORKFLOW)
    recipe = Recipe(RecipeConfig(folder=str(folder), data=DATA, seed=3))
    assert recipe.train_query(0).data["answer"] and len(recipe.eval_queries()) == 2
    own = "def train_query(position, seed, **data): ...\ndef eval_queries(seed, **data): return []\n"
    (folder / "workflow.py").write_text(WORKFLOW + own)
    assert Recipe(RecipeConfig(folder=str(folder), data=DATA, seed=3)).eval_queries() == []


@pytest.mark.parametrize(
    ("data", "rows", "message"),
    [
        ({"train": "nothing.jsonl"}, ROWS, "data.train='nothing.jsonl': there is no such file"),
        ({"train": "train.jsonl"}, ROWS, "row 1: there is no text in the column 'prompt' .columns: question"),
        (DATA, [ROWS[0], {"question": 3}], "row 2: there is no text in the column 'question'"),
        (DATA, [], "there are no rows"),
        (DATA, [[1]], "row 1: there is no text in the column 'question' .columns: list"),
        (
            DATA | {"shuffel": True},
            ROWS,
            "data.shuffel: there is no such key for data from files; there are: train",
        ),
    ],
)
def test_mistakes_are_named(folder: Path, data: dict[str, Any], rows: list[Any], message: str) -> None:
    write_lines(folder / "train.jsonl", rows)
    with pytest.raises(RecipeError, match=message):
        DataFiles(folder, data).train_query(0, 0)


def test_a_torn_line_is_named(folder: Path) -> None:
    with (folder / "train.jsonl").open("a") as file:
        file.write('{"question": "1')
    with pytest.raises(RecipeError, match=r"train\.jsonl, line 6: is not JSON"):
        DataFiles(folder, DATA).train_query(0, 0)
