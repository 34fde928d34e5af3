"""The lease under which a peer's requests begin."""

import pytest

from flexmarl.core.protocol.lease import Lease
from flexmarl.core.protocol.session import Session, Settings

from .sessions import Caller

# A caller gives up after 10 s of silence, at the earliest.
SETTINGS = Settings(heartbeat_s=5.0, missed_heartbeats=3)


def test_it_begins_with_the_first_mark_that_is_confirmed() -> None:
    lease = Lease(SETTINGS)
    assert lease.is_over(0.0) and lease.check_at < 0.0
    lease.renewing()
    assert lease.is_over(0.0) and lease.check_at < 0.0, "a mark that is under way begins nothing"
    lease.confirmed(100.0)
    assert not lease.is_over(109.9) and lease.is_over(110.0)


def test_a_confirmed_mark_renews_it_from_the_time_at_which_the_mark_was_sent() -> None:
    lease = Lease(SETTINGS)
    lease.confirmed(102.0)
    assert not lease.is_over(111.9) and lease.is_over(112.0)
    lease.confirmed(101.0)
    assert not lease.is_over(111.9), "an older mark takes nothing back"


def test_marks_are_sent_in_its_second_half_and_once() -> None:
    lease = Lease(SETTINGS)
    lease.confirmed(100.0)
    assert lease.check_at == pytest.approx(105.0, abs=0.02)
    lease.renewing()
    assert lease.check_at == pytest.approx(110.0, abs=0.02), "only its end remains to be noticed"
    assert lease.is_over(lease.check_at) and not lease.is_over(lease.check_at - 0.001)
    lease.confirmed(110.0)
    assert lease.check_at == pytest.approx(115.0, abs=0.02) and not lease.is_over(119.0)


def test_it_ends_before_the_caller_gives_up_also_if_the_clock_of_this_machine_is_slower() -> None:
    lease = Lease(SETTINGS)
    lease.confirmed(0.0)
    for rate in (0.999, 0.9995, 1.0):
        assert lease.is_over(10.0 * rate)


def test_a_peer_that_notices_each_missing_heartbeat_has_a_lease_of_one() -> None:
    lease = Lease(Settings(heartbeat_s=1.0, missed_heartbeats=1))
    lease.confirmed(0.0)
    assert not lease.is_over(0.9) and lease.is_over(1.0)


@pytest.mark.parametrize("missed_heartbeats", [1, 2, 3, 8])
def test_a_silent_peer_is_given_up_after_the_end_of_its_lease_there(missed_heartbeats: int) -> None:
    settings = Settings(heartbeat_s=5.0, missed_heartbeats=missed_heartbeats)
    session: Session[Caller] = Session(settings, up=True)
    session.serve_stream(0.0)
    session.heard(1)  # right before the tick at 5 s: the shortest silence
    times = iter(range(5, 100, 5))
    given_up_at = next(time for time in times if session.advance(time).silent)
    assert given_up_at - 5.0 == settings.silence_s
    lease = Lease(settings)
    lease.confirmed(5.0)
    assert lease.is_over(given_up_at) and not lease.is_over(given_up_at - 0.1)
