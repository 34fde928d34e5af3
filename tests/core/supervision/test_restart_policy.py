"""The choice of the children to restart, their order, and the moment of giving up."""

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flexmarl.core.supervision.restart_policy import Escalate, Intensity, Restart, Restarts, Strategy

THREE_A_MINUTE = Intensity(3, 60)


def three(strategy: Strategy, intensity: Intensity = THREE_A_MINUTE) -> Restarts:
    restarts = Restarts(strategy, intensity)
    for child in ("store", "trainer", "rollout"):
        restarts.add(child)
    return restarts


def test_one_for_one_restarts_the_dead_alone() -> None:
    assert three(Strategy.ONE_FOR_ONE).died("trainer", 0) == Restart((), ("trainer",))


def test_one_for_all_stops_the_newest_first_and_starts_the_oldest_first() -> None:
    decision = three(Strategy.ONE_FOR_ALL).died("trainer", 0)
    assert decision == Restart(("rollout", "store"), ("store", "trainer", "rollout"))


def test_a_child_that_was_stopped_is_not_started_again() -> None:
    restarts = three(Strategy.ONE_FOR_ALL)
    restarts.remove("store")
    assert "store" not in restarts
    assert restarts.died("trainer", 0) == Restart(("rollout",), ("trainer", "rollout"))


def test_restarts_count_for_all_children_within_the_period_and_not_after() -> None:
    restarts = three(Strategy.ONE_FOR_ONE, Intensity(2, 10))
    restarts.died("store", 0)
    restarts.died("trainer", 5)
    assert isinstance(restarts.died("store", 10.1), Restart), "the first is longer ago than the period"
    assert restarts.died("rollout", 15) == Escalate("rollout", 2, 10)
    assert restarts.died("store", 1000) == Escalate("rollout", 2, 10), "for good"


def test_none_allowed_escalates_the_first_death() -> None:
    assert three(Strategy.ONE_FOR_ALL, Intensity(0, 1)).died("store", 0) == Escalate("store", 0, 1)


def test_one_given_up_is_not_restarted_and_no_other_is_after_it() -> None:
    restarts = three(Strategy.ONE_FOR_ONE)
    assert restarts.give_up("trainer") == Escalate("trainer", 0, 60)
    assert restarts.died("store", 1) == Escalate("trainer", 0, 60)


@pytest.mark.parametrize(("max_restarts", "period_s"), [(-1, 60), (3, 0), (3, -1), (3, float("nan"))])
def test_an_intensity_makes_sense(max_restarts: int, period_s: float) -> None:
    with pytest.raises(ValueError, match="invalid intensity"):
        Intensity(max_restarts, period_s)


class Life(RuleBasedStateMachine):
    """Children come, go and die; the model keeps every restart that ever was."""

    @initialize(
        strategy=strategies.sampled_from(Strategy),
        max_restarts=strategies.integers(0, 4),
        period_s=strategies.integers(1, 20),
    )
    def begin(self, strategy: Strategy, max_restarts: int, period_s: int) -> None:
        self.restarts = Restarts(strategy, Intensity(max_restarts, period_s))
        self.strategy, self.max_restarts, self.period_s = strategy, max_restarts, period_s
        self.children: list[str] = []
        self.restarted_at: list[int] = []
        self.now = self.made = 0
        self.escalation: Escalate | None = None

    @rule()
    def add(self) -> None:
        self.made += 1
        self.children.append(f"child-{self.made}")
        self.restarts.add(self.children[-1])

    @rule(seconds=strategies.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @precondition(lambda self: self.children)
    @rule(data=strategies.data())
    def remove(self, data: strategies.DataObject) -> None:
        child = data.draw(strategies.sampled_from(self.children))
        self.children.remove(child)
        self.restarts.remove(child)

    @precondition(lambda self: self.children)
    @rule(data=strategies.data())
    def die(self, data: strategies.DataObject) -> None:
        child = data.draw(strategies.sampled_from(self.children))
        decision = self.restarts.died(child, self.now)
        recent = sum(at >= self.now - self.period_s for at in self.restarted_at)
        if self.escalation is None and recent < self.max_restarts:
            self.restarted_at.append(self.now)
            alone = self.strategy is Strategy.ONE_FOR_ONE
            start = [child] if alone else self.children
            stop = [] if alone else [other for other in self.children[::-1] if other != child]
            assert decision == Restart(tuple(stop), tuple(start))
        else:
            self.escalation = self.escalation or Escalate(child, recent, self.period_s)
            assert decision == self.escalation

    @invariant()
    def never_more_than_allowed(self) -> None:
        for at in self.restarted_at:
            within = [other for other in self.restarted_at if at <= other <= at + self.period_s]
            assert len(within) <= self.max_restarts


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=100, stateful_step_count=50)
