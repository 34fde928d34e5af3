"""Sessions of a process that was stopped (SIGSTOP) for a while, and of one whose peer was."""

from typing import Any

import pytest

from flexmarl.core.protocol.session import LinkState, Session

from .sessions import CALL, SMALL, STREAM, TELL, ask, up

DAY_S = 86400.0


@pytest.mark.parametrize("left_s", [0.01, 0.5, 30.0])
def test_deadlines_do_not_run_while_this_side_is_stopped(left_s: float) -> None:
    session = up()
    request = ask(session, CALL, timeout_s=left_s)
    due = session.wake_at()
    assert due is not None
    session.heard(1)
    woken = due + DAY_S
    assert session.advance(woken, woken - due).expired == []
    assert session.advance(woken + left_s + 1.0).expired == [request], "late by a heartbeat at most"


def test_one_that_was_late_by_less_than_a_heartbeat_keeps_its_deadlines() -> None:
    session = up()
    request = ask(session, CALL, timeout_s=0.5)
    assert session.advance(1.4, 0.9).expired == [request]


def test_the_deadline_for_connecting_does_not_run_either() -> None:
    session: Session[Any] = Session(SMALL)
    request = ask(session, CALL)
    assert session.advance(1.0 + DAY_S, DAY_S).dead == []
    assert session.advance(1.0 + DAY_S + 4.0).dead == [request]


@pytest.mark.parametrize("kind", [CALL, TELL, STREAM])
def test_a_trusted_peer_may_be_silent_also_before_it_is_connected(kind: Any) -> None:
    session: Session[Any] = Session(SMALL, trusted=True)
    request = ask(session, kind, timeout_s=DAY_S)
    for second in range(1, 100):
        assert session.advance(float(second)).dead == []
    session.connected()
    session.heard(1)
    for second in range(100, 200):
        effects = session.advance(float(second))
        assert effects.dead == [] and not effects.lost_tells and effects.ping == request.id
    assert session.state is LinkState.UP
    assert len(session.requests) == 1
