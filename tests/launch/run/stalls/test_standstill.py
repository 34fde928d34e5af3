"""The standstill of a run: when it is noticed, how often, and what counts as progress."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flexmarl.launch.run.stalls.standstill import Moving, Standstill, Still


def notices(standstill: Standstill, until_s: int, counts: dict[str, int], first_s: int = 0) -> list[object]:
    """One look a second."""
    found = [standstill.observe(counts, float(now)) for now in range(first_s, until_s)]
    return [notice for notice in found if notice is not None]


def test_it_is_noticed_after_the_limit_and_then_after_twice_the_time() -> None:
    standstill = Standstill(30.0)
    assert notices(standstill, 301, {"a": 5}) == [Still(30.0), Still(60.0), Still(120.0), Still(240.0)]
    assert (standstill.is_still, standstill.idle_s) == (True, 300.0)
    assert standstill.observe({"a": 6}, 301.0) == Moving(301.0)
    assert (standstill.is_still, standstill.idle_s) == (False, 0.0)
    assert notices(standstill, 340, {"a": 6}, 302) == [Still(30.0)], "from the beginning"


def test_a_process_that_is_new_or_restarted_or_silent_is_no_progress() -> None:
    standstill = Standstill(30.0)
    standstill.observe({"store": 7, "rollout-0": 5}, 0.0)
    standstill.observe({"store": 7}, 1.0)
    standstill.observe({"store": 7, "rollout-0": 3, "rollout-1": 9}, 2.0)
    assert standstill.idle_s == 2.0
    standstill.observe({"store": 7, "rollout-0": 5}, 3.0)
    assert standstill.idle_s == 3.0, "less than before, and then the same"
    standstill.observe({"rollout-1": 10}, 4.0)
    assert standstill.idle_s == 0.0


def test_the_patience_is_three_times_the_longest_time_between_two_work_items() -> None:
    standstill = Standstill(30.0)
    assert standstill.patience_s(10.0) == 10.0
    for done, now in enumerate((0.0, 4.0, 12.0, 14.0)):
        for second in range(int(standstill._last or 0), int(now) + 1):
            standstill.observe({"a": done if second == now else done - 1}, float(second))
    assert standstill.patience_s(10.0) == 24.0 and standstill.patience_s(60.0) == 60.0


def test_a_standstill_does_not_lengthen_the_patience() -> None:
    standstill = Standstill(30.0)
    notices(standstill, 500, {"a": 0})
    standstill.observe({"a": 1}, 500.0)
    assert standstill.patience_s(10.0) == 10.0


def test_time_in_which_the_launcher_was_suspended_counts_5_s_at_most() -> None:
    standstill = Standstill(30.0)
    standstill.observe({"a": 1}, 0.0)
    assert standstill.observe({"a": 1}, 3600.0) is None
    assert standstill.idle_s == 5.0


class Watched(RuleBasedStateMachine):
    """Any order of looks and work: the model counts the time since the last work item."""

    @initialize(limit_s=st.sampled_from([2.0, 10.0, 30.0]))
    def begin(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.standstill = Standstill(limit_s)
        self.now = 100.0
        self.counts = {"a": 3, "b": 0}
        self.heard = {"a", "b"}
        self.idle_s = 0.0
        self.next_s = limit_s
        self.standstill.observe(self.counts, self.now)

    @rule(name=st.sampled_from(["a", "b"]), seconds=st.floats(0.0, 4.0))
    def work_ends(self, name: str, seconds: float) -> None:
        was_still = self.next_s > self.limit_s
        self.counts[name] += 1
        notice = self._look(seconds, moved=True)
        assert isinstance(notice, Moving) == was_still, "exactly after a Still"
        assert not isinstance(notice, Still)

    @rule(seconds=st.floats(0.0, 4.0))
    def nothing_ends(self, seconds: float) -> None:
        self._check(self._look(seconds))

    @rule(name=st.sampled_from(["a", "b"]), seconds=st.floats(0.0, 4.0))
    def a_process_is_silent(self, name: str, seconds: float) -> None:
        counts = {other: count for other, count in self.counts.items() if other != name}
        self._check(self._look(seconds, counts=counts))

    @rule(name=st.sampled_from(["a", "b"]), lost=st.integers(0, 5))
    def a_process_reports_less(self, name: str, lost: int) -> None:
        counts = self.counts | {name: max(0, self.counts[name] - lost)}
        self._check(self._look(1.0, counts=counts))

    @rule(count=st.integers(0, 100))
    def another_process_comes(self, count: int) -> None:
        name = f"new-{len(self.counts)}"
        self.counts[name] = count
        self._check(self._look(1.0))

    @rule(seconds=st.floats(5.0, 1e6))
    def the_launcher_is_suspended(self, seconds: float) -> None:
        self._check(self._look(seconds))

    def _look(
        self, seconds: float, *, moved: bool = False, counts: dict[str, int] | None = None
    ) -> Still | Moving | None:
        before = self.now
        self.now += seconds
        self.idle_s += min(self.now - before, 5.0)
        notice = self.standstill.observe(self.counts if counts is None else counts, self.now)
        if moved:
            if notice is not None:
                assert notice.seconds == self.idle_s
            self.idle_s, self.next_s = 0.0, self.limit_s
        return notice

    def _check(self, notice: Still | Moving | None) -> None:
        """Nothing has ended."""
        if self.idle_s < self.next_s:
            assert notice is None
        else:
            assert notice == Still(self.idle_s) and self.idle_s >= self.limit_s
            self.next_s *= 2

    @invariant()
    def the_time_is_known(self) -> None:
        assert self.standstill.idle_s == self.idle_s
        assert self.standstill.is_still == (self.next_s > self.limit_s)


TestWatched = Watched.TestCase
TestWatched.settings = settings(max_examples=60)


def test_a_stop_gives_work_that_has_just_ended_the_time_to_be_seen() -> None:
    standstill = Standstill(30.0)
    notices(standstill, 61, {"a": 5})
    assert not standstill.is_given_up(10.0, asked_s=1.0), "its counts are as old as a second or two"
    assert standstill.is_given_up(10.0, asked_s=5.0)
    standstill.observe({"a": 6}, 62.0)
    assert not standstill.is_given_up(10.0, asked_s=5.0), "it moves again"
    notices(standstill, 124, {"a": 6}, 63)
    assert not standstill.is_given_up(300.0, asked_s=70.0)
