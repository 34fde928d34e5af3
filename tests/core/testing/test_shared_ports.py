"""Transfers that share ports."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core.testing.shared_ports import SharedPorts

PORTS = ("a", "b", "c", "d")
Uses = dict[str, float]


@dataclass(frozen=True)
class Begin:
    at_s: float
    size_bytes: float
    uses: Uses
    latency_s: float
    stops_after_s: float | None


def bandwidths() -> st.SearchStrategy[Uses]:
    return st.fixed_dictionaries({port: st.floats(1.0, 1e9) for port in PORTS})


def uses() -> st.SearchStrategy[Uses]:
    return st.dictionaries(st.sampled_from(PORTS), st.sampled_from((1.0, 0.5, 1 / 3, 1 / 16)), min_size=1)


def begins() -> st.SearchStrategy[list[Begin]]:
    begin = st.builds(
        Begin,
        at_s=st.floats(0.0, 10.0),
        size_bytes=st.floats(1.0, 1e9),
        uses=uses(),
        latency_s=st.sampled_from((0.0, 1e-5, 0.5)),
        stops_after_s=st.none() | st.floats(0.0, 5.0),
    )
    return st.lists(begin, min_size=1, max_size=12)


class Play:
    """Plays begins and stops at their times, and changes when they are due; checks the rates after each."""

    def __init__(self, bytes_s: Uses, plan: list[Begin]) -> None:
        self.bytes_s, self.plan = bytes_s, plan
        self.ports = SharedPorts[int](bytes_s)
        self.uses: dict[int, Uses] = {}
        self.ends: dict[int, float] = {}
        self.stopped: set[int] = set()

    def run(self) -> None:
        events = [(begin.at_s, 1, number) for number, begin in enumerate(self.plan)]
        for number, begin in enumerate(self.plan):
            if begin.stops_after_s is not None:
                events.append((begin.at_s + begin.stops_after_s, 2, number))
        for at_s, kind, number in sorted(events):
            while self.ports.due_s <= at_s:
                self.deliver()
            if kind == 1:
                begin = self.plan[number]
                self.ports.begin(number, begin.size_bytes, begin.uses, at_s, begin.latency_s)
                self.uses[number] = begin.uses
            elif number not in self.ends:
                self.ports.stop(number, at_s)
                self.stopped.add(number)
            self.check()
        while self.ports.due_s < math.inf:
            self.deliver()

    def deliver(self) -> None:
        due_s = self.ports.due_s
        for number in self.ports.ended(due_s):
            assert number not in self.ends and number not in self.stopped
            self.ends[number] = due_s
        self.check()

    def check(self) -> None:
        rates = self.ports.rates()
        loads = {
            port: sum(rate * self.uses[number].get(port, 0.0) for number, rate in rates.items())
            for port in PORTS
        }
        for port, load in loads.items():
            assert load <= self.bytes_s[port] * (1 + 1e-9)
        # Max-min fair (Bertsekas and Gallager, 1992, 6.5.2): each crosses a full port on which none is faster.
        for number, rate in rates.items():
            assert any(
                loads[port] >= self.bytes_s[port] * (1 - 1e-9)
                and all(other <= rate * (1 + 1e-9) for n, other in rates.items() if port in self.uses[n])
                for port in self.uses[number]
            )


@given(bandwidths(), begins())
def test_no_port_carries_more_than_its_bandwidth_and_each_transfer_has_a_full_port(
    bytes_s: Uses, plan: list[Begin]
) -> None:
    Play(bytes_s, plan).run()


@given(bandwidths(), begins())
def test_all_bytes_arrive_and_no_others_cross_a_port(bytes_s: Uses, plan: list[Begin]) -> None:
    whole = [Begin(one.at_s, one.size_bytes, one.uses, one.latency_s, None) for one in plan]
    play = Play(bytes_s, whole)
    play.run()
    assert play.ends.keys() == set(range(len(whole)))
    for port in PORTS:
        crossed = sum(one.size_bytes * one.uses.get(port, 0.0) for one in whole)
        # Each may end within ten nanoseconds of its last byte.
        slack = 1e-8 * bytes_s[port] * (len(whole) + 1)
        assert play.ports.carried_bytes[port] == pytest.approx(crossed, rel=1e-6, abs=slack)


@given(bandwidths(), begins())
def test_none_is_faster_than_alone(bytes_s: Uses, plan: list[Begin]) -> None:
    play = Play(bytes_s, plan)
    play.run()
    for number, end_s in play.ends.items():
        one = plan[number]
        alone_s = max(one.size_bytes * part / bytes_s[port] for port, part in one.uses.items())
        assert end_s - one.at_s >= alone_s + one.latency_s - 1e-7 - 1e-9 * end_s


@given(bandwidths(), begins())
def test_of_two_that_are_alike_the_first_ends_first(bytes_s: Uses, plan: list[Begin]) -> None:
    alike = [Begin(one.at_s, plan[0].size_bytes, plan[0].uses, 0.0, None) for one in plan]
    play = Play(bytes_s, alike)
    play.run()
    order = sorted(range(len(alike)), key=lambda number: alike[number].at_s)
    ends = [play.ends[number] for number in order]
    assert ends == sorted(ends)


@given(
    st.floats(1.0, 1e12), st.floats(1.0, 1e12), st.floats(1e3, 1e12), st.floats(0.0, 10.0), st.floats(0, 1e6)
)
def test_a_lone_transfer_takes_its_bytes_by_the_narrowest_port_and_its_latency(
    size: float, wide: float, narrow: float, latency_s: float, now_s: float
) -> None:
    ports = SharedPorts[str]({"wide": wide + narrow, "narrow": narrow})
    ports.begin("one", size, {"wide": 1.0, "narrow": 1.0}, now_s, latency_s)
    while not ports.ended(due_s := ports.due_s):
        pass
    assert due_s - now_s == pytest.approx(size / narrow + latency_s, rel=1e-9, abs=3e-8)


def test_two_share_a_port_and_the_one_that_is_left_gets_it_whole() -> None:
    """10 bytes each over 2 bytes/s, the second 2 s later: 4 bytes, then 1 byte/s for 6 s, then 2."""
    ports = SharedPorts[str]({"port": 2.0})
    ports.begin("first", 10, {"port": 1.0}, 0.0)
    ports.begin("second", 10, {"port": 1.0}, 2.0)
    assert ports.rates() == {"first": 1.0, "second": 1.0}
    assert ports.due_s == 8.0 and ports.ended(8.0) == ["first"]
    assert ports.due_s == 10.0 and ports.ended(10.0) == ["second"]
    assert ports.due_s == math.inf and ports.carried_bytes == {"port": 20.0}


def test_the_rest_of_a_port_goes_to_those_that_can_use_it() -> None:
    """Max-min: the second is limited elsewhere, so that the first has all that it leaves."""
    ports = SharedPorts[str]({"shared": 10.0, "narrow": 2.0})
    ports.begin("wide", 100, {"shared": 1.0}, 0.0)
    ports.begin("narrow", 100, {"shared": 1.0, "narrow": 1.0}, 0.0)
    assert ports.rates() == {"narrow": 2.0, "wide": 8.0}


def test_a_transfer_that_is_stopped_leaves_its_bandwidth() -> None:
    ports = SharedPorts[str]({"port": 2.0})
    ports.begin("first", 10, {"port": 1.0}, 0.0)
    ports.begin("second", 10, {"port": 1.0}, 0.0)
    ports.stop("second", 4.0)
    assert ports.due_s == 7.0
    ports.stop("second", 5.0)
    assert ports.ended(7.0) == ["first"]


def test_nothing_to_move_takes_the_latency() -> None:
    ports = SharedPorts[str]({"port": 2.0})
    ports.begin("empty", 0, {"port": 1.0}, 1.0, 0.5)
    ports.begin("here", 10, {}, 1.0)
    assert ports.ended(1.0) == ["here"] and ports.due_s == 1.5 and ports.ended(1.5) == ["empty"]


def test_what_can_not_be_is_refused_with_its_numbers() -> None:
    with pytest.raises(ValueError, match="port slow has a bandwidth of 0"):
        SharedPorts[str]({"slow": 0.0})
    ports = SharedPorts[str]({"port": 2.0})
    ports.begin("one", 10, {"port": 1.0}, 0.0)
    with pytest.raises(ValueError, match="'one' is under way"):
        ports.begin("one", 10, {"port": 1.0}, 0.0)
    with pytest.raises(ValueError, match="-1 bytes"):
        ports.begin("two", -1, {"port": 1.0}, 0.0)
    with pytest.raises(ValueError, match=r"0\.0 of it crosses port port"):
        ports.begin("two", 1, {"port": 0.0}, 0.0)
    with pytest.raises(KeyError, match="other"):
        ports.begin("two", 1, {"other": 1.0}, 0.0)
