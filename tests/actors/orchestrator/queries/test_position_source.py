"""Positions: each once, in order; digests of queries are equal for equal queries, in every process."""

import subprocess
import sys

import pytest

from flexmarl.actors.errors import DataChanged
from flexmarl.actors.messages import Query
from flexmarl.actors.orchestrator.queries.position_source import PositionSource, digest, digest_of_all

QUERY = Query("q1", "2 + 2", {"answer": 4, "tags": ["sum", "é"], "weight": 0.1})


def test_each_part_of_a_query_counts() -> None:
    others = [
        Query("q2", QUERY.text, QUERY.data),
        Query("q1", "2 + 3", QUERY.data),
        Query("q1", QUERY.text, {**QUERY.data, "answer": 5}),
        Query("q1", QUERY.text, {}),
    ]
    assert len({digest(query) for query in [QUERY, *others]}) == 5
    assert digest(Query("q1", "2 + 2", dict(QUERY.data))) == digest(QUERY)
    assert digest_of_all([QUERY, others[0]]) != digest_of_all([others[0], QUERY])


def test_another_process_gets_the_same_digest() -> None:
    program = (
        "from flexmarl.actors.messages import Query\n"
        "from flexmarl.actors.orchestrator.queries.position_source import digest\n"
        f"print(digest({QUERY!r}))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == digest(QUERY)


def of_position(position: int) -> Query:
    return Query(f"q{position}", "text")


def test_a_restored_source_compares_the_newest_queries_and_continues() -> None:
    source = PositionSource(of_position)
    assert [source.next(1).id for _ in range(300)] == [f"q{n}" for n in range(300)]
    state = source.state()
    asked: list[int] = []

    def train_query(position: int) -> Query:
        asked.append(position)
        return of_position(position)

    restored = PositionSource(train_query)
    restored.restore(state)
    assert len(asked) > 50 and asked == [*range(300 - len(asked), 300)]
    assert restored.state() == state and restored.next(2).id == "q300"


def test_another_query_at_a_position_is_named() -> None:
    source = PositionSource(of_position)
    for _ in range(5):
        source.next(1)
    changed = PositionSource(lambda position: Query("q9" if position == 3 else f"q{position}", "text"))
    with pytest.raises(DataChanged, match=r"train_query\(3\) now returns the query 'q9'.*--accept data"):
        changed.restore(source.state())
    changed.restore({**source.state(), "digests": []})
    assert changed.next(1).id == "q5"
