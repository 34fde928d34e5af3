"""A row's statuses move by the table of transitions and in no other way; the queue of READY rows."""

from itertools import product
from typing import get_args

import pytest

from flexmarl.actors.errors import ProtocolViolation
from flexmarl.actors.store.row import TRANSITIONS, Event, ReadyQueue, Row, Status, move

STATUSES: tuple[Status, ...] = get_args(Status)
EVENTS: tuple[Event, ...] = get_args(Event)

ALLOWED = """
    writing  -complete->      ready
    ready    -lease->         leased
    leased   -give_back->     ready
    leased   -commit->        consumed
    writing  -discard->       discarded
    ready    -discard->       discarded
    ready    -undo_complete-> writing
    consumed -undo_commit->   leased
    discarded -undo_discard-> writing
    writing  -replay_commit-> consumed
    ready    -replay_commit-> consumed
"""


def row(number: int = 0, version: int = 0, status: Status = "writing") -> Row:
    return Row("solver", f"1:q_0_{number}", 1, version, 0, number, (), status)


@pytest.mark.parametrize(("status", "event"), [*product(STATUSES, EVENTS)])
def test_an_event_moves_a_row_as_the_table_says_or_not_at_all(status: Status, event: Event) -> None:
    expected = {
        (before, arrow[1:-2]): after for before, arrow, after in map(str.split, ALLOWED.strip().splitlines())
    }
    moved = row(status=status)
    if (after := expected.get((status, event))) is not None:
        move([moved], event)
        assert moved.status == after
    else:
        with pytest.raises(ProtocolViolation, match=f"is {status}: {event} is impossible"):
            move([moved], event)
        assert moved.status == status


def test_a_row_that_is_over_changes_only_by_an_undo() -> None:
    for (status, event), after in TRANSITIONS.items():
        if status in ("consumed", "discarded"):
            assert event.startswith("undo_"), (status, event, after)


def test_a_row_that_was_dropped_is_not_taken_from_the_queue() -> None:
    queue, rows = ReadyQueue(), [row(n, version=n % 2) for n in range(6)]
    for one in reversed(rows):
        queue.push(one)
    queue.drop(rows[0])
    queue.push(rows[0])
    queue.drop(rows[2])
    assert (queue.count(0, 0), queue.count(0, 1)) == (2, 5)
    assert queue.take(0, 1, 4) == [rows[0], rows[4], rows[1], rows[3]]
    assert queue.take(0, 1, 1) == [rows[5]]
    assert queue.count(0, 1) == 0
