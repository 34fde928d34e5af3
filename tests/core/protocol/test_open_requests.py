"""The requests of one side: ids, answers, deadlines, and the credit that they hold."""

import tracemalloc

import pytest

from .sessions import CALL, STREAM, TELL, Caller, ask, up


def test_ids_ascend_without_a_gap() -> None:
    session = up()
    assert [ask(session, kind).id for kind in (CALL, TELL, STREAM)] == [1, 2, 3]


def test_a_reply_ends_its_request_once_and_a_later_one_is_counted() -> None:
    session = up()
    request = ask(session, CALL)
    assert session.requests.answered(request.id, 1) == ([request], [])
    assert session.requests.answered(request.id, 1) == ([None], [])
    assert session.statistics().late_replies == 1
    assert session.requests.credit("a").requests == session.requests.credit("a").size_bytes == 0


def test_answers_to_several_requests_give_the_credit_of_each_back() -> None:
    session = up()
    first, second, third = (ask(session, kind) for kind in (CALL, STREAM, CALL))
    session.requests.abandon(second)
    assert session.requests.answered(first.id, 4) == ([first, None, third, None], [])
    assert session.requests.credit("a").requests == session.requests.credit("a").size_bytes == 0
    assert session.statistics().late_replies == 2


def test_requests_to_one_endpoint_share_their_callee_and_all_of_an_actor_its_credit() -> None:
    requests = up().requests
    callee = requests.callee(CALL, "actor", "endpoint", 2.0)
    assert requests.callee(CALL, "actor", "endpoint", 2.0) is callee
    others = [
        requests.callee(kind, "actor", "endpoint", seconds) for kind, seconds in ((TELL, 2.0), (CALL, 3.0))
    ]
    assert callee not in others and all(other.credit is callee.credit for other in others)
    assert requests.callee(CALL, "other", "endpoint", 2.0).credit is not callee.credit


def test_an_answer_to_a_one_way_message_changes_nothing() -> None:
    session = up()
    request = ask(session, TELL)
    assert session.requests.answered(request.id, 1) == ([None], [])
    assert session.requests.credit("a").requests == 1 and session.requests.has_tells()
    session.requests.done([request.id, request.id])
    assert session.requests.credit("a").requests == 0 and not session.requests.has_tells()


def test_credit_is_held_until_the_answer_and_not_until_the_deadline() -> None:
    session = up()
    request = ask(session, CALL, timeout_s=0.5)
    effects = session.advance(0.5)
    assert effects.expired == [request] and session.requests.credit("a").requests == 1
    assert session.requests.answered(request.id, 1)[0] == [None]
    assert session.requests.credit("a").requests == 0 and session.statistics().late_replies == 1


@pytest.mark.parametrize(
    "ranges",
    [
        [1, 2, 4, 4],
        [4, 4, 1, 2],
        [1, 2**63],
        [-5, 4],
        [1, 4] * 200_000,
        [0, 2**62, 1, 2**62] * 1000,
        [1, 2, 4, 4, 9],
    ],
)
def test_done_gives_back_the_credit_of_one_way_messages_whatever_it_claims(ranges: list[int]) -> None:
    session = up()
    for kind in (TELL, TELL, CALL, TELL):
        ask(session, kind)
    assert session.requests.done(ranges) == []
    assert [request.callee.kind for request in session.requests] == [
        CALL
    ] and not session.requests.has_tells()
    assert session.requests.credit("a").requests == 1


@pytest.mark.parametrize("ranges", [[], [3, 3], [5, 2], [7, 9], [-4, -1], [2**64 - 1, 2**64 - 1], [1]])
def test_done_touches_nothing_else(ranges: list[int]) -> None:
    session = up()
    for kind in (TELL, TELL, CALL, TELL):
        ask(session, kind)
    session.requests.done(ranges)
    assert session.statistics().in_flight == 4


def test_deadlines_of_answered_requests_do_not_pile_up() -> None:
    session = up()
    ask(session, CALL, timeout_s=1.0)  # in front of all others
    for _ in range(10_000):
        session.requests.answered(ask(session, CALL).id, 1)
    assert len(session.requests._deadlines) < 2000
    assert session.wake_at() == 1.0


def test_credit_of_actors_that_were_called_once_does_not_accumulate() -> None:
    requests = up().requests
    waiter = Caller("one of many")

    def call(actor: str) -> int:
        callee = requests.callee(CALL, actor, "endpoint", 1.0)
        assert callee.credit.take(100)
        return requests.add(1.0, callee, waiter, 100).id

    kept = [(f"kept {number}", call(f"kept {number}")) for number in range(10)]
    tracemalloc.start()
    try:
        for number in range(100_000):
            requests.answered(call(f"unknown {number}"), 1)
        assert tracemalloc.get_traced_memory()[0] < 2**20
    finally:
        tracemalloc.stop()
    for actor, number in kept:
        credit = requests.credit(actor)
        assert (credit.requests, credit.size_bytes) == (1, 100), "credit in use is kept"
        requests.answered(number, 1)
        assert (credit.requests, credit.size_bytes) == (0, 0)
