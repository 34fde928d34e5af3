"""The seconds of requests: added, begun, ended."""

import pytest

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
