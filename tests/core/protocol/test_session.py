"""Sessions: the states of the link, and each rule by itself; ``test_session_storm.py`` runs two on a bad link."""

from collections.abc import Callable
from typing import Any

import pytest

from flexmarl.core.protocol.session import (
    TRANSITIONS,
    Admission,
    Effects,
    LinkEvent,
    LinkState,
    Session,
)

from .sessions import CALL, SMALL, STREAM, TELL, Turn, ask, up


def test_an_abandoned_request_is_cancelled_again_with_every_tick() -> None:
    session = up()
    request = ask(session, CALL)
    assert session.requests.abandon(request) and not session.requests.abandon(request)
    assert session.advance(1.0).cancel == [request.id]
    assert session.requests.answered(request.id, 1)[0] == [None]
    assert session.advance(2.0).cancel == []


def test_a_duplicate_is_ignored_and_what_was_overtaken_is_refused() -> None:
    session = up()
    order = (1, 1, 4, 2, 2, 5, 3, 5)
    d, dup, over = Admission.DELIVER, Admission.DUPLICATE, Admission.OUT_OF_ORDER
    assert [session.admit(number) for number in order] == [d, dup, d, over, dup, d, over, dup]
    assert (session.statistics().duplicates, session.statistics().out_of_order) == (3, 2)


def test_a_long_gap_costs_nothing() -> None:
    session = up()
    for number in range(1, 2000):
        assert session.admit(number * 2**40) is Admission.DELIVER
    assert session.admit(1999 * 2**40 - 1) is Admission.OUT_OF_ORDER
    assert session.admit(2**40 + 1) is Admission.DUPLICATE  # forgotten: its sender learns from a PONG


def test_when_the_link_goes_down_all_fail() -> None:
    session = up()
    call, _, stream = (ask(session, kind) for kind in (CALL, TELL, STREAM))
    session.requests.credit("a").waiting.append(waiting := Turn(10))
    effects = session.disconnected("cut")
    assert effects.dead == [call, stream] and effects.lost_tells == 1 and effects.reason == "cut"
    assert effects.waiting == [("a", waiting)] and effects.gone and not session.requests.has_tells()
    assert session.state is LinkState.DOWN and not session.requests


def test_what_is_asked_while_the_link_is_down_fails_in_time() -> None:
    session = up()
    session.disconnected("cut")
    call = ask(session, CALL, now=5.0)
    assert session.advance(6.9).dead == []
    assert session.advance(7.0).dead == [call]
    assert session.wake_at() is not None and session.advance(9.0) and session.wake_at() is None


def test_nobody_there_is_found_out_within_the_connect_timeout() -> None:
    session: Session[Any] = Session(SMALL)
    request = ask(session, CALL, now=3.0)
    assert session.wake_at() == 4.0
    assert session.advance(4.0).ping is None
    assert session.wake_at() == 5.0 and session.advance(5.0).dead == [request]


def test_a_new_incarnation_fails_what_the_old_one_was_asked() -> None:
    session = up()
    session.admit(7)
    call = ask(session, CALL)
    assert session.heard(1) is None
    effects = session.heard(2)
    assert effects is not None and effects.dead == [call]
    assert session.admit(1) is Admission.DELIVER, "the new incarnation counts from 1 again"
    assert session.is_over(1) and not session.is_over(2)


@pytest.mark.parametrize("silent_from", [0.0, 0.4, 0.99])
def test_silence_is_found_out_within_the_missed_heartbeats(silent_from: float) -> None:
    session = up()
    request = ask(session, STREAM)
    now = 0.0
    for _ in range(5):  # alive: every PING is answered
        now = session.wake_at() or 0.0
        assert session.advance(now).ping == request.id
        session.heard(1)
        session.pong(request.id, [request.id])
    stopped = now + silent_from
    while not (effects := session.advance(now := session.wake_at() or 0.0)).dead:
        assert effects.ping is not None
    assert effects.dead == [request] and "silent" in effects.reason
    assert 2.0 < now - stopped <= 3.0


def test_after_idling_a_silent_peer_is_found_out_within_the_missed_heartbeats() -> None:
    session = up()
    answered = ask(session, CALL)
    session.advance(1.0)
    session.requests.answered(answered.id, 1)
    session.advance(2.0)
    assert session.wake_at() is None, "nothing depends on the peer, so it is not pinged"
    request = ask(session, CALL, now=100.0)
    assert not session.advance(101.0).dead and not session.advance(102.0).dead
    assert session.advance(103.0).dead == [request]


def test_a_loop_that_was_busy_calls_nobody_dead() -> None:
    session = up()
    ask(session, CALL, timeout_s=10_000.0)
    assert session.advance(1000.0).dead == []
    assert session.wake_at() == 1001.0


def test_serving_a_stream_watches_its_receiver() -> None:
    session = up()
    session.serve_stream(0.0)
    assert session.wake_at() == 1.0 and session.advance(1.0).ping == 0
    assert not session.advance(2.0).gone and session.advance(3.0).gone
    session.end_stream()
    session.advance(4.0)
    assert session.wake_at() is None


def test_a_pong_settles_what_was_lost() -> None:
    session = up()
    served, lost, _, served_tell = (ask(session, kind) for kind in (CALL, CALL, TELL, TELL))
    assert session.advance(1.0).ping == 4
    later, later_tell = ask(session, CALL), ask(session, TELL)
    effects = session.pong(4, [served.id, served_tell.id])
    assert effects.dead == [lost] and effects.lost_tells == 1
    assert list(session.requests) == [served, later]
    assert list(session.requests._tells) == [served_tell.id, later_tell.id]


def test_a_pong_that_nobody_asked_for_changes_nothing() -> None:
    session = up()
    ask(session, CALL), ask(session, STREAM)
    effects = session.pong(2, [])
    assert not effects.dead and session.statistics().in_flight == 2


def test_closing_ends_everything() -> None:
    session = up()
    call, stream = ask(session, CALL), ask(session, STREAM)
    assert session.close("over").dead == [call, stream]
    session.advance(60.0)
    assert session.wake_at() is None


def test_what_was_lost_is_withdrawn_where_the_connection_comes_again() -> None:
    session = up()
    call, _, stream = (ask(session, kind) for kind in (CALL, TELL, STREAM))
    for tick in range(1, 4):
        effects = session.advance(float(tick))
    assert effects.silent and effects.dead == [call, stream]
    session.disconnected(effects.reason)
    unsent = ask(session, CALL)
    effects = session.connected()
    assert effects.withdraw == stream.id < unsent.id and effects.cancel == []


def test_each_connection_withdraws_what_was_sent_before_as_those_before_it_may_not_have_been_read() -> None:
    session = up()
    ask(session, TELL), ask(session, CALL)
    assert session.disconnected("cut").lost_tells == 1
    for _ in range(3):
        assert session.connected().withdraw == 2
        session.disconnected("cut")
    assert Session[Any](SMALL).connected().withdraw == 0, "nothing was sent before the first one"


def test_what_a_new_incarnation_may_have_received_of_failed_requests_is_withdrawn_at_once() -> None:
    session = up()
    first, second = ask(session, CALL), ask(session, CALL)
    effects = session.heard(2)
    assert effects is not None and effects.dead == [first, second]
    assert effects.withdraw == second.id


MAKE: dict[LinkState, Callable[[], Session[Any]]] = {
    LinkState.CONNECTING: Session,
    LinkState.UP: lambda: after(LinkEvent.CONNECTED),
    LinkState.DOWN: lambda: after(LinkEvent.CONNECTED, LinkEvent.DISCONNECTED),
    LinkState.CLOSED: lambda: after(LinkEvent.CLOSED),
}


def after(*events: LinkEvent) -> Session[Any]:
    session: Session[Any] = Session(SMALL)
    for event in events:
        apply(session, event)
    return session


def apply(session: Session[Any], event: LinkEvent) -> Effects[Any]:
    match event:
        case LinkEvent.CONNECTED:
            return session.connected()
        case LinkEvent.DISCONNECTED:
            return session.disconnected("cut")
        case LinkEvent.CLOSED:
            return session.close("over")


@pytest.mark.parametrize("event", LinkEvent)
@pytest.mark.parametrize("state", LinkState)
def test_a_link_moves_as_the_table_says_and_in_no_other_way(state: LinkState, event: LinkEvent) -> None:
    session = MAKE[state]()
    assert session.state is state
    if event in TRANSITIONS[state]:
        apply(session, event)
        assert session.state is TRANSITIONS[state][event]
    else:
        with pytest.raises(AssertionError, match=f"a link that is {state.value} can't be {event.value}"):
            apply(session, event)
        assert session.state is state


def test_every_state_is_in_the_table_and_can_be_reached() -> None:
    assert TRANSITIONS.keys() == MAKE.keys() == set(LinkState)
    reached = {to for moves in TRANSITIONS.values() for to in moves.values()} | {LinkState.CONNECTING}
    assert reached == set(LinkState)
    assert all(LinkEvent.CLOSED in moves for moves in TRANSITIONS.values()), "this side can always leave"


@pytest.mark.parametrize("state", [state for state in LinkState if state is not LinkState.CLOSED])
def test_what_is_asked_in_any_state_fails_at_a_refusal_and_leaves_the_state(state: LinkState) -> None:
    session = MAKE[state]()
    call = ask(session, CALL)
    assert session.fail("it does not let this side in").dead == [call]
    assert session.state is state
