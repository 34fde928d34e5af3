"""The token bucket of a session's calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.gateway.call_rate import BURST_S, CallRate


def test_a_burst_then_the_rate() -> None:
    rate = CallRate(2.0)
    assert [rate.take(5.0) for _ in range(20)] == [0.0] * 20
    assert rate.take(5.0) == pytest.approx(0.5)
    assert rate.take(5.25) == pytest.approx(0.25)
    assert rate.take(5.5) == 0.0
    assert rate.take(5.5) == pytest.approx(0.5)


def test_a_rate_of_less_than_a_call_in_a_burst_allows_the_first() -> None:
    rate = CallRate(0.01)
    assert rate.take(0.0) == 0.0
    assert rate.take(0.0) == pytest.approx(100.0)


@given(st.floats(0.1, 1000.0), st.lists(st.floats(0.0, 5.0), max_size=200))
def test_no_span_of_time_has_more_calls_than_a_burst_and_the_rate(per_s: float, pauses: list[float]) -> None:
    rate, now_s, allowed = CallRate(per_s), 0.0, list[float]()
    for pause in pauses:
        now_s += pause
        delay_s = rate.take(now_s)
        if delay_s == 0.0:
            allowed.append(now_s)
        else:
            assert 0.0 < delay_s <= 1.0 / per_s
    most = max(1.0, per_s * BURST_S)
    for number, end_s in enumerate(allowed):
        assert number + 1 <= most + per_s * end_s + 1e-6
