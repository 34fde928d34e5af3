"""Retired writers and kept reports, and the records that lead to them."""

import msgpack
import pytest

from flexmarl.actors.errors import WriterRetired
from flexmarl.actors.messages import AgentTurns, GroupClosed, TrajectoryFailure
from flexmarl.actors.names import AgentName, Step
from flexmarl.actors.store.writers import REPORT, RETIRE, Writers, report_of

SOLVER = AgentName("solver")


def report(step: int, query: str) -> GroupClosed:
    failure = TrajectoryFailure(f"{step}:{query}_0", "no luck", "...")
    return GroupClosed(
        Step(step),
        query,
        {SOLVER: 2},
        {SOLVER: AgentTurns({"turns": 1, "tokens": 2, "truncated_turns": 1})},
        0.5,
        {SOLVER: [1.0]},
        [failure],
    )


def test_reports_stay_until_their_step_is_complete_or_their_put_is_undone() -> None:
    writers = Writers()
    for writer, step, query in (("a", 1, "q0"), ("b", 1, "q1"), ("a", 2, "q2"), ("a", 2, "q3")):
        writers.add(writer, report(step, query))
    writers.remove("a", report(2, "q3"))
    assert writers.reports("a") == [report(1, "q0"), report(2, "q2")]
    writers.forget(Step(1))
    assert writers.reports("a") == [report(2, "q2")] and writers.reports("b") == []
    assert writers.reports("unknown") == []


def test_records_lead_to_the_same_state() -> None:
    writers, again = Writers(), Writers()
    writers.add("a", report(1, "q0"))
    writers.add("b", report(1, "q1"))
    writers.retire("b")
    for record in writers.records():
        kind, writer, *what = msgpack.unpackb(record, strict_map_key=False)
        if kind == RETIRE:
            again.retire(writer)
        else:
            assert kind == REPORT and what[1] is None
            again.add(writer, report_of(what[0]))
    assert list(again.records()) == list(writers.records())
    again.check("a")
    with pytest.raises(WriterRetired, match="writer b is retired"):
        again.check("b")
