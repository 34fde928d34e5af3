"""The restarts that are allowed, and the moment of giving up."""

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flexmarl.core.supervision.restart_policy import Escalate, Intensity, Restarts

THREE_A_MINUTE = Intensity(3, 60)


def three(intensity: Intensity = THREE_A_MINUTE) -> Restarts:
    restarts = Restarts(intensity)
    for child in ("store", "trainer", "rollout"):
        restarts.add(child)
    return restarts


def test_a_child_that_was_stopped_is_not_started_again() -> None:
    restarts = three()
    restarts.remove("store")
    assert "store" not in restarts
    assert "trainer" in restarts and restarts.died("trainer", 0) is None


def test_restarts_count_for_all_children_within_the_period_and_not_after() -> None:
    restarts = three(Intensity(2, 10))
    restarts.died("store", 0)
    restarts.died("trainer", 5)
    assert restarts.died("store", 10.1) is None, "the first is longer ago than the period"
    assert restarts.died("rollout", 15) == Escalate("rollout", 2, 10)
    assert restarts.died("store", 1000) == Escalate("rollout", 2, 10), "for good"


def test_none_allowed_escalates_the_first_death() -> None:
    assert three(Intensity(0, 1)).died("store", 0) == Escalate("store", 0, 1)


def test_one_given_up_is_not_restarted_and_no_other_is_after_it() -> None:
    restarts = three()
    assert restarts.give_up("trainer") == Escalate("trainer", 0, 60)
    assert restarts.died("store", 1) == Escalate("trainer", 0, 60)


@pytest.mark.parametrize(("max_restarts", "period_s"), [(-1, 60), (3, 0), (3, -1), (3, float("nan"))])
def test_an_intensity_makes_sense(max_restarts: int, period_s: float) -> None:
    with pytest.raises(ValueError, match="invalid intensity"):
        Intensity(max_restarts, period_s)


class Life(RuleBasedStateMachine):
    """Children come, go and die; the model keeps every restart that ever was."""

    @initialize(
        max_restarts=strategies.integers(0, 4),
        period_s=strategies.integers(1, 20),
    )
    def begin(self, max_restarts: int, period_s: int) -> None:
        self.restarts = Restarts(Intensity(max_restarts, period_s))
        self.max_restarts, self.period_s = max_restarts, period_s
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
            assert decision is None
        else:
            self.escalation = self.escalation or Escalate(child, recent, self.period_s)
            assert decision == self.escalation

    @invariant()
    def never_more_than_allowed(self) -> None:
        for at in self.restarted_at:
            within = [other for other in self.restarted_at if at <= other <= at + self.period_s]
            assert len(within) <= self.max_restarts


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=50, stateful_step_count=50)
