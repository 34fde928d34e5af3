"""The seconds of requests: added, begun, ended."""

import pytest

from flexmarl.actors.inference.engines.engine import Phases
from flexmarl.actors.inference.engines.request_times import RequestTimes


def test_a_request_waits_and_is_served() -> None:
    now = [10.0]
    times = RequestTimes(lambda: now[0])
    for name in "ab":
        times.add(name)
        now[0] += 1.0
    assert ("a" in times, "b" in times, "c" in times, len(times)) == (True, True, False, 2)
    times.begin("a")  # at 12, after 2
    now[0] += 4.0
    times.begin("a")  # again: its group was put back
    times.end("a")
    assert (times.queue_s, times.service_s) == (2.0, 4.0)
    times.end("b")  # without a beginning, after 5
    assert (times.queue_s, times.service_s, len(times)) == (7.0, 4.0, 0)
    with pytest.raises(KeyError):
        times.end("a")


def test_the_time_of_a_request_has_three_parts() -> None:
    now = [10.0]
    times = RequestTimes(lambda: now[0])
    for name in "abcd":
        times.add(name)
    now[0] = 12.0
    for name in "abc":
        times.begin(name)
    now[0] = 15.0
    times.first_token("a")
    times.first_token("b", 14.0)
    times.first_token("unknown")
    now[0] = 20.0
    times.first_token("a")  # the first counts
    assert times.end("a") == Phases(2.0, 3.0)
    assert times.end("b") == Phases(2.0, 2.0)
    assert times.end("c") == Phases(2.0, 8.0), "it had no token: all of it is the prompt's"
    assert times.end("d") == Phases(10.0, 0.0), "it has not begun"
    assert (times.queue_s, times.service_s) == (16.0, 24.0)
