"""Writes, leases and ends that tables refuse, each by its reason."""

from collections.abc import Callable
from typing import Any

import pytest

from flexmarl.actors.columns.declared_columns import Column
from flexmarl.actors.errors import ConfigError, StoreError
from flexmarl.actors.names import AgentName
from flexmarl.actors.store.schema import Schema
from flexmarl.actors.store.tables import Tables

from .rows import FIRST, OWN, A, B, columns, make

REFUSED: list[tuple[str, Callable[[Tables], Any], str]] = [
    (
        "an unknown agent",
        lambda t: t.put({"c": columns("1:q_0_9")}),
        "no table for agent 'c'; there are: a, b",
    ),
    ("a duplicate", lambda t: t.put({"a": columns("1:q_0_0")}), "1:q_0_0 was written before and is ready"),
    ("a leased duplicate", lambda t: t.put({"a": columns("1:q_0_1")}), "written before and is leased"),
    ("a consumed duplicate", lambda t: t.put({"a": columns("1:q_0_2")}), "written before and is consumed"),
    ("twice in one put", lambda t: t.put({"a": columns("1:q_1_0", "1:q_1_0")}), "1:q_1_0 comes twice"),
    ("no sample id", lambda t: t.put({"a": columns("q_0_0")}), "'q_0_0' is not named {step}:{query}_{turn}"),
    ("an evaluation", lambda t: t.put({"a": columns("eval:q_0_0")}), "'eval:q_0_0' is not named"),
    (
        "ids that are not strings",
        lambda t: t.put({"a": columns("1:q_1_0", sample_id=[1])}),
        "column sample_id",
    ),
    ("no ids", lambda t: t.put({"a": {"reward": [1.0]}}), "column sample_id is missing"),
    (
        "no version",
        lambda t: t.put({"a": {"sample_id": ["1:q_1_0"], "reward": [1.0]}}),
        "lacks the column policy_version",
    ),
    (
        "a negative version",
        lambda t: t.put({"a": columns("1:q_1_0", policy_version=[-1])}),
        "column policy_version has values that are not whole numbers",
    ),
    (
        "a version too many",
        lambda t: t.put({"a": columns("1:q_1_0", policy_version=[1, 2])}),
        "column policy_version has 2 values for 1 rows",
    ),
    (
        "NaN",
        lambda t: t.put({"a": columns("1:q_1_0", reward=[float("nan")])}),
        "column reward wants a finite float",
    ),
    ("an unknown column", lambda t: t.put({"a": columns("1:q_1_0", score=[1.0])}), "unknown column 'score'"),
    (
        "a meta column",
        lambda t: t.put({"a": columns("1:q_1_0", status=["ready"])}),
        "unknown column 'status'",
    ),
    ("half a surrogate", lambda t: t.put({"a": columns("1:q\ud800_1_0")}), "can't be packed"),
    (
        "good for one agent, bad for the other",
        lambda t: t.put({"b": columns("1:q_0_0"), "a": columns("1:q_0_0")}),
        "table a: sample 1:q_0_0 was written before",
    ),
    (
        "a write to a row that is not there",
        lambda t: t.write({"a": {"sample_id": ["1:q_5_0"], "note": ["x"]}}),
        "there is no sample '1:q_5_0'",
    ),
    (
        "a write to a consumed row",
        lambda t: t.write({"a": {"sample_id": ["1:q_0_2"], "note": ["x"]}}),
        "1:q_0_2 is consumed: it takes no more columns",
    ),
    (
        "a write to a discarded row",
        lambda t: t.write({"a": {"sample_id": ["1:q_0_0", "1:q_0_3"], "note": ["x", "x"]}}),
        "1:q_0_3 is discarded: it takes no more columns",
    ),
    (
        "a column again",
        lambda t: t.write({"a": {"sample_id": ["1:q_0_0"], "note": ["x"], "reward": [0.0]}}),
        "1:q_0_0: column reward was written already",
    ),
    (
        "too many rows",
        lambda t: t.lease(A, 3, 2, 9.0),
        "2 rows of version 3 were asked for, 1 are ready",
    ),
    (
        "too many rows of several versions",
        lambda t: t.lease(A, 5, 2, 9.0, 2),
        "2 rows of versions 3 to 5 were asked for, 1 are ready",
    ),
    ("no rows", lambda t: t.lease(A, 3, 0, 9.0), "0 rows of version 3 were asked for"),
    ("a fence never given", lambda t: t.commit(A, [FIRST + 1, FIRST + 2], 8), "it was never given out"),
    ("no fence at all", lambda t: t.commit(A, [5], 8), "fence 5 is active: it was never given out"),
    ("a used fence", lambda t: t.commit(A, [FIRST], 8), "version 7 was committed with it"),
    ("another policy's fence", lambda t: t.commit(B, [FIRST + 1], 8), "is another policy's"),
    (
        "the version again with other leases",
        lambda t: t.commit(A, [FIRST + 1], 7),
        "version 7 does not follow 7, which was committed with 1 leases, not these",
    ),
    ("an earlier version", lambda t: t.commit(A, [FIRST + 1], 6), "version 6 does not follow 7"),
    ("discarding what is leased", lambda t: t.discard({"a": ["1:q_0_0", "1:q_0_1"]}), "1:q_0_1 is leased"),
    ("discarding what is consumed", lambda t: t.discard({"a": ["1:q_0_2"]}), "1:q_0_2 is consumed"),
    ("discarding what is not there", lambda t: t.discard({"a": ["1:q_5_0"]}), "there is no sample '1:q_5_0'"),
    (
        "closing a step with rows",
        lambda t: t.close_steps(2),
        "2 rows are left, among them 1:q_0_1, which is leased",
    ),
]


@pytest.mark.parametrize(("what", "act", "why"), REFUSED, ids=[what for what, _, _ in REFUSED])
def test_what_is_refused_changes_nothing(
    tables: Tables, what: str, act: Callable[[Tables], Any], why: str
) -> None:
    def state() -> object:
        return list(tables.snapshot()), list(tables.scalars()), tables.counts()

    before = state()
    with pytest.raises(StoreError, match=why):
        act(tables)
    assert state() == before
    assert tables.lease(A, 3, 1, 10.0).fence == FIRST + 2


def test_a_closed_step_takes_nothing_more(tables: Tables) -> None:
    tables.commit(A, [FIRST + 1], 8)
    tables.discard({"a": ["1:q_0_0"]})
    assert tables.close_steps(2).rows == 4
    again = make()
    for record in tables.snapshot():
        again.apply(record)
    for closed in (tables, again):
        with pytest.raises(StoreError, match="sample 1:q_0_0 is of step 1, which is closed"):
            closed.put({"a": columns("1:q_0_0")})
        with pytest.raises(StoreError, match=r"no sample '1:q_0_0' \(steps before 2 are closed\)"):
            closed.write({"a": {"sample_id": ["1:q_0_0"], "note": ["x"]}})
        assert closed.close_steps(2).record is None


def test_two_agents_agree_about_a_columns_type() -> None:
    score = Schema({"score": Column(type="float")})
    with pytest.raises(ConfigError, match="column 'score' is str for agent 'b' and float for another"):
        Tables(OWN, {AgentName("a"): score, AgentName("b"): Schema({"score": Column(type="str")})})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("1:q_0_7", "neither a sample nor a trajectory '1:q_0_7' is in the store"),
        ("eval:q_0", "in the store .*evaluations never come here"),
        ("q7", r"'q7' is neither a sample id, \{step\}:\{query\}_\{turn\}_\{trajectory\}, nor"),
        ("", "'' is neither a sample id"),
    ],
)
def test_a_trajectory_that_is_not_here_is_refused(tables: Tables, name: str, why: str) -> None:
    with pytest.raises(StoreError, match=why):
        tables.trajectory(name)
