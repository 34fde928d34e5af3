"""`async`, batches of a fixed size, and groups that are dropped, under every order of events."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.orchestrator.pipeline import (
    CommitCheckpoint,
    Decision,
    Evaluate,
    Finish,
    Pipeline,
    Plan,
    Publish,
    Replacement,
    Save,
    StartStep,
    StepComplete,
    StepOptimizer,
    Train,
)

AGENTS = ("a", "b")
Item = tuple[int, dict[str, int] | None] | Decision


class Cluster:
    """Carries decisions out in an order that ``data`` picks; rows lie in a store and know who generated them.

    ``by_version``: the store leases the oldest version first, not the oldest step.
    """

    def __init__(self, plan: Plan, data: st.DataObject, *, by_version: bool) -> None:
        self.plan, self.data, self.by_version = plan, data, by_version
        self.served = dict.fromkeys(plan.agents, 0)
        self.trainers = dict.fromkeys(plan.agents, 0)
        self.pipeline = Pipeline(plan, self.served)
        self.open: list[Item] = []
        self.history: list[Decision] = []
        self.started: dict[int, dict[str, int]] = {}
        self.groups = Counter[int]()
        self.replacements = Counter[int]()
        self.ready: dict[str, list[tuple[int, int]]] = {agent: [] for agent in plan.agents}
        self.accumulated: dict[str, list[tuple[int, int]]] = {agent: [] for agent in plan.agents}
        self.passed_over: dict[str, int] = dict.fromkeys(plan.agents, 0)
        self.generated = Counter[str]()
        self.stepped_on = Counter[str]()
        self.batches: list[tuple[str, int, int]] = []
        self.oldest = 0

    def run(self, stop_after: int | None = None) -> None:
        self.take(self.pipeline.start())
        fired = 0
        while possible := [n for n, item in enumerate(self.open) if self.is_possible(n, item)]:
            if fired == stop_after:
                self.take(self.pipeline.request_stop())
            fired += 1
            self.fire(self.open.pop(self.data.draw(st.sampled_from(possible))))
        assert not self.open, "some work is never done"
        assert isinstance(self.history[-1], Finish)

    def is_possible(self, place: int, item: Item) -> bool:
        """An agent's work is done in order."""
        if isinstance(item, tuple):
            return True
        agent = getattr(item, "agent", None)
        return agent is None or all(getattr(i, "agent", None) != agent for i in self.open[:place])

    def take(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            assert not isinstance(self.history[-1] if self.history else None, Finish)
            self.history.append(decision)
            match decision:
                case StartStep(step, versions):
                    assert versions == self.served
                    self.started[step] = versions
                    self.open += [self.a_group(step) for _ in range(self.plan.queries)]
                case Replacement(step):
                    self.replacements[step] += 1
                    assert self.replacements[step] <= self.plan.replacement_queries
                    self.open.append(self.a_group(step))
                case StepComplete(step):
                    assert self.groups[step] == self.plan.queries
                case Finish():
                    pass
                case _:
                    self.open.append(decision)

    def a_group(self, step: int) -> Item:
        """None: it will be dropped."""
        counts = st.fixed_dictionaries({agent: st.integers(0, 6) for agent in self.plan.agents})
        return step, self.data.draw(st.none() | counts if self.plan.replacement_queries else counts)

    def fire(self, item: Item) -> None:
        match item:
            case (step, None):
                decisions = self.pipeline.group_closed(step, dict.fromkeys(AGENTS, 0), dropped=True)
                self.groups[step] += Replacement(step) not in decisions
                self.take(decisions)
            case (step, counts):
                self.groups[step] += 1
                self.close(step, counts)
            case Train(agent, step, version, count):
                self.train(agent, version, count)
                self.take(self.pipeline.trained(agent, step, count))
            case StepOptimizer(agent, step):
                self.step_optimizer(agent, step)
                self.take(self.pipeline.stepped(agent, step))
            case Publish(agent, step, version):
                assert version == self.served[agent] + 1
                self.served[agent] = version
                self.take(self.pipeline.applied(agent, step, version))
            case Save(agent, step):
                assert not self.accumulated[agent], "what is accumulated is in no checkpoint"
                self.take(self.pipeline.saved(agent, step))
            case CommitCheckpoint(step):
                self.take(self.pipeline.committed(step))
            case Evaluate(step, versions):
                assert versions == self.served and not any(isinstance(i, tuple) for i in self.open)
                self.take(self.pipeline.evaluated(step))

    def close(self, step: int, counts: dict[str, int]) -> None:
        """Each row was generated by some version that was served since the step began."""
        for agent, count in counts.items():
            for _ in range(count):
                version = self.data.draw(st.integers(self.started[step][agent], self.served[agent]))
                self.ready[agent].append((step, version))
            self.generated[agent] += count
        self.take(self.pipeline.group_closed(step, counts))

    def train(self, agent: str, version: int, count: int) -> None:
        assert version == self.trainers[agent], "another version than the trainer's was named"
        assert 1 <= count <= self.plan.micro_batch
        rows = self.ready[agent]
        rows.sort(key=lambda row: row[::-1] if self.by_version else row)
        assert len(rows) >= count, "more rows were asked for than there are"
        for _, generated_by in rows[:count]:
            staleness = version - generated_by
            assert 0 <= staleness <= self.plan.max_staleness
            self.oldest = max(self.oldest, staleness)
        self.accumulated[agent] += rows[:count]
        del rows[:count]

    def step_optimizer(self, agent: str, step: int) -> None:
        used, size = self.accumulated[agent], self.plan.global_batch.get(agent)
        assert self.groups[step] == self.plan.queries, "stepped before the step was rolled out"
        assert used
        if not self.by_version:  # else rows of later steps may have been taken for some of this one
            left = sum(s <= step for s, _ in self.ready[agent])
            assert len(used) == max(size, self.passed_over[agent]) if size is not None and left else left == 0
            self.passed_over[agent] = left
        self.stepped_on[agent] += len(used)
        self.batches.append((agent, step, len(used)))
        self.accumulated[agent] = []
        self.trainers[agent] += 1


plans = st.builds(
    Plan,
    mode=st.just("async"),
    agents=st.just(AGENTS),
    first_step=st.just(1),
    last_step=st.integers(1, 6),
    queries=st.integers(1, 3),
    micro_batch=st.integers(1, 5),
    save_every=st.integers(0, 4),
    evaluate_every=st.integers(0, 4),
    evaluate_first=st.booleans(),
    max_staleness=st.integers(1, 3),
    global_batch=st.dictionaries(st.sampled_from(AGENTS), st.integers(5, 12)),
    whole_step=st.sampled_from([(), ("a",), AGENTS]),
    replacement_queries=st.integers(0, 2),
)


@settings(deadline=None, max_examples=150)
@given(plan=plans, data=st.data())
def test_nothing_is_staler_than_it_may_be_and_everything_is_trained_once(
    plan: Plan, data: st.DataObject
) -> None:
    # Which rows a lease hands out first, those of the oldest step or of the oldest version, must not matter.
    cluster = Cluster(plan, data, by_version=data.draw(st.booleans()))
    cluster.run()
    assert [d.step for d in cluster.history if isinstance(d, StartStep)] == [*range(1, plan.last_step + 1)]
    assert [d.step for d in cluster.history if isinstance(d, StepComplete)] == [*range(1, plan.last_step + 1)]
    assert +cluster.stepped_on == +cluster.generated, "every sample is in one optimizer step"
    for complete in [d for d in cluster.history if isinstance(d, StepComplete)]:
        if plan.save_every and complete.step % plan.save_every == 0:
            assert set(complete.carried.values()) == {0}, "a checkpoint left rows behind"


@settings(deadline=None, max_examples=100)
@given(plan=plans, data=st.data(), stop_after=st.integers(0, 60))
def test_a_stop_ends_it(plan: Plan, data: st.DataObject, stop_after: int) -> None:
    cluster = Cluster(plan, data, by_version=False)
    cluster.run(stop_after)
    started = max((d.step for d in cluster.history if isinstance(d, StartStep)), default=0)
    assert cluster.history[-1] == Finish(started)
    assert +cluster.stepped_on == +cluster.generated, "every sample is in one optimizer step"


def plan(**more: object) -> Plan:
    settings = {
        "mode": "async",
        "agents": ("a",),
        "first_step": 1,
        "last_step": 9,
        "queries": 1,
        "micro_batch": 4,
        "max_staleness": 2,
    }
    return Plan(**{**settings, **more})  # type: ignore[arg-type]  # of plan's own types


def test_rollout_runs_ahead_as_far_as_it_may() -> None:
    pipeline = Pipeline(plan(), {"a": 0})
    assert pipeline.start() == [StartStep(n, {"a": 0}) for n in (1, 2, 3)]
    assert pipeline.group_closed(2, {"a": 4}) == [], "an agent trains its steps in order"
    assert pipeline.group_closed(1, {"a": 4}) == [Train("a", 1, 0, 4)]
    assert pipeline.trained("a", 1, 4) == [StepOptimizer("a", 1)]
    assert pipeline.stepped("a", 1) == [Publish("a", 1, 1), Train("a", 2, 1, 4)]
    assert pipeline.trained("a", 2, 4) == [], "one version at a time is on its way to the instances"
    assert pipeline.applied("a", 1, 1) == [
        StepComplete(1, False), StepOptimizer("a", 2), StartStep(4, {"a": 1}),
    ]  # fmt: skip


def test_what_is_over_a_fixed_batch_is_carried_once() -> None:
    pipeline = Pipeline(plan(micro_batch=2, global_batch={"a": 4}), {"a": 0})
    assert pipeline.start() == [StartStep(1, {"a": 0}), StartStep(2, {"a": 0})]
    assert pipeline.group_closed(1, {"a": 9}) == [Train("a", 1, 0, 2), Train("a", 1, 0, 2)]
    pipeline.trained("a", 1, 2)
    assert pipeline.trained("a", 1, 2) == [StepOptimizer("a", 1)]
    stepped = pipeline.stepped("a", 1)
    assert stepped == [Publish("a", 1, 1), *[Train("a", 2, 1, 2)] * 2, Train("a", 2, 1, 1)]
    complete = pipeline.applied("a", 1, 1)[0]
    assert isinstance(complete, StepComplete) and complete.carried == {"a": 5}
    assert complete.versions == {"a": 1}


def test_a_batch_that_is_not_full_waits_with_what_was_trained() -> None:
    pipeline = Pipeline(plan(micro_batch=2, global_batch={"a": 6}), {"a": 0})
    pipeline.start()
    assert pipeline.group_closed(1, {"a": 5}) == [Train("a", 1, 0, 2), Train("a", 1, 0, 2)]
    pipeline.trained("a", 1, 2)
    assert pipeline.trained("a", 1, 2) == [StepComplete(1, False), StartStep(3, {"a": 0})]
    assert pipeline.group_closed(2, {"a": 3}) == [Train("a", 2, 0, 2)]
    assert pipeline.trained("a", 2, 2) == [StepOptimizer("a", 2)]


def test_a_dropped_group_is_replaced_until_the_limit() -> None:
    pipeline = Pipeline(plan(mode="strict", max_staleness=0, queries=2, replacement_queries=1), {"a": 0})
    pipeline.start()
    assert pipeline.group_closed(1, {"a": 0}, dropped=True) == [Replacement(1)]
    assert pipeline.group_closed(1, {"a": 0}, dropped=True) == []
    assert pipeline.group_closed(1, {"a": 4}) == [Train("a", 1, 0, 4), StartStep(2, {"a": 1})]


def test_a_stopping_run_draws_no_more_queries() -> None:
    pipeline = Pipeline(plan(mode="strict", max_staleness=0, queries=2, replacement_queries=9), {"a": 0})
    pipeline.start()
    pipeline.request_stop()
    assert Replacement(1) not in pipeline.group_closed(1, {"a": 0}, dropped=True)


def test_an_agent_that_cannot_stream_waits_for_the_step_and_no_other_does() -> None:
    whole = plan(mode="strict", max_staleness=0, agents=AGENTS, queries=2, whole_step=("a",))
    pipeline = Pipeline(whole, {"a": 0, "b": 0})
    pipeline.start()
    assert pipeline.group_closed(1, {"a": 4, "b": 4}) == [Train("b", 1, 0, 4)]
    assert Train("a", 1, 0, 4) in pipeline.group_closed(1, {"a": 4, "b": 4})
