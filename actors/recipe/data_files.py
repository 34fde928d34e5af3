"""Queries from files, for a recipe without data code of its own.

    data: {train: problems.jsonl, eval: held_out.parquet, prompt: question, answer: answer, shuffle: true}

A row is one query: the column ``prompt`` is its text, all columns are its ``data``, and the column ``answer`` is there
as ``data["answer"]``. Each epoch takes every training row once, in an order that the seed and the epoch give.
"""

import json
import random
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

from ..errors import RecipeError
from ..messages import Query

_KEYS: Final = ("train", "eval", "prompt", "answer", "shuffle")


class DataFiles:
    """The functions ``train_query`` and ``eval_queries`` of such a recipe. Files are relative to its ``folder``, or to
    the working directory. Its methods raise RecipeError naming the file and the line."""

    def __init__(self, folder: Path, data: Mapping[str, Any]) -> None:
        self._folder = folder
        self._prompt, self._answer = data.get("prompt", "prompt"), data.get("answer", "answer")
        self._shuffles = data.get("shuffle", True)
        if unknown := sorted(data.keys() - set(_KEYS)):
            raise RecipeError(
                f"data.{unknown[0]}: there is no such key for data from files; there are: {', '.join(_KEYS)}"
            )
        self._data = data
        self._order = lru_cache(maxsize=2)(self._draw_order)

    # Read when they are first asked for: rollout workers load the recipe too, and draw no queries.

    @cached_property
    def _train(self) -> list[dict[str, Any]]:
        return self._rows("train")

    @cached_property
    def _eval(self) -> list[dict[str, Any]]:
        return self._rows("eval") if "eval" in self._data else []

    def train_query(self, position: int, seed: int, **_: Any) -> Query:
        """The query at ``position`` of the training data, which begins again after its last row."""
        epoch, place = divmod(position, len(self._train))
        row = self._order(seed, epoch)[place] if self._shuffles else place
        return self._query(self._train[row], f"{row}" if epoch == 0 else f"{row}/{epoch}")

    def eval_queries(self, seed: int, **_: Any) -> list[Query]:
        """All rows of the evaluation's file; none without one."""
        return [self._query(row, f"eval-{number}") for number, row in enumerate(self._eval)]

    def _draw_order(self, seed: int, epoch: int) -> list[int]:
        order = list(range(len(self._train)))
        random.Random(f"{seed} {epoch}").shuffle(order)
        return order

    def _query(self, row: dict[str, Any], query_id: str) -> Query:
        answer = {"answer": row[self._answer]} if self._answer in row else {}
        return Query(query_id, row[self._prompt], {**row, **answer})

    def _rows(self, key: str) -> list[dict[str, Any]]:
        name = str(self._data[key])
        file = next((place for place in (self._folder / name, Path(name)) if place.is_file()), None)
        if file is None:
            raise RecipeError(f"data.{key}={name!r}: there is no such file in {self._folder} or {Path.cwd()}")
        rows = _read_parquet(file) if file.suffix == ".parquet" else _read_lines(file)
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict) or not isinstance(row.get(self._prompt), str):
                columns = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise RecipeError(
                    f"{file}, row {number}: there is no text in the column {self._prompt!r} (columns: {columns}): name "
                    "the column of the prompts by data.prompt"
                )
        if not rows:
            raise RecipeError(f"{file}: there are no rows")
        return rows


def _read_lines(file: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise RecipeError(f"{file}, line {number}: is not JSON: {error}") from None
    return rows


def _read_parquet(file: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise RecipeError(f"{file}: pyarrow is not installed: pip install 'flexmarl[datasets]'") from None
    try:
        rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
    except (ArrowException, OSError) as error:
        raise RecipeError(f"{file}: can't be read as Parquet: {error}") from None
    return rows
