"""Digests of queries: equal for equal queries, in every process."""

import subprocess
import sys

import pytest

from flexmarl.actors.errors import DataChanged
from flexmarl.actors.messages import Query
from flexmarl.actors.orchestrator.queries.query_digests import (
    QueryDigests,
    check_evaluation,
    check_training,
    digest,
    digest_of_all,
)

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
        "from flexmarl.actors.orchestrator.queries.query_digests import digest\n"
        f"print(digest({QUERY!r}))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == digest(QUERY)


def test_the_newest_are_remembered_up_to_a_position() -> None:
    queries = [Query(f"q{n}", "") for n in range(500)]
    digests = QueryDigests({})
    digests.drew(range(300), queries[:300])
    digests.drew(range(300, 310), queries[300:310])
    known = digests.before(305)
    assert known == {n: digest(queries[n]) for n in range(305 - len(known), 305)} and len(known) > 50
    resumed = QueryDigests(known)
    resumed.drew(range(305, 310), queries[305:310])
    assert resumed.before(310).keys() > {300, 304, 309}


def test_another_query_at_a_position_is_named() -> None:
    made = {3: digest(QUERY)}
    check_training(made, {3: QUERY})
    with pytest.raises(DataChanged, match=r"train_query\(3\) now returns the query 'q9'.*--accept data"):
        check_training(made, {3: Query("q9", "2 + 2")})


def test_an_evaluation_on_other_queries_is_named() -> None:
    made = digest_of_all([QUERY])
    check_evaluation(made, [QUERY])
    check_evaluation("", [])
    with pytest.raises(DataChanged, match="eval_queries now returns other queries"):
        check_evaluation(made, [QUERY, Query("q2", "")])
