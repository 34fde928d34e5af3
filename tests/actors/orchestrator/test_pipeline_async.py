"""`async`, batches of a fixed size, and groups that are dropped, under every order of events."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.names import PolicyName, Step, Version
from flexmarl.actors.orchestrator.decisions import (
    CommitCheckpoint,
    Decision,
    Evaluate,
    Finish,
    Publish,
    Replacement,
    Save,
    StartStep,
    StepComplete,
    StepOptimizer,
    Train,
)
from flexmarl.actors.orchestrator.pipeline import Pipeline
from flexmarl.actors.orchestrator.plan import Plan

S = Step
V = Version

A, B = map(PolicyName, "ab")
POLICIES = (A, B)
Item = tuple[S, dict[PolicyName, int] | None] | Decision


class Cluster:
    """Carries decisions out in an order that ``data`` picks; rows lie in a store and know who generated them.

    ``by_version``: the store leases the oldest version first, not the oldest step.
    """

    def __init__(self, plan: Plan, data: st.DataObject, *, by_version: bool) -> None:
        self.plan, self.data, self.by_version = plan, data, by_version
        self.served = dict.fromkeys(plan.policies, V(0))
        self.trainers = dict.fromkeys(plan.policies, V(0))
        self.pipeline = Pipeline(plan, self.served)
        self.open: list[Item] = []
        self.history: list[Decision] = []
        self.started: dict[S, dict[PolicyName, V]] = {}
        self.groups = Counter[S]()
        self.replacements = Counter[S]()
        self.ready: dict[PolicyName, list[tuple[int, int]]] = {policy: [] for policy in plan.policies}
        self.accumulated: dict[PolicyName, list[tuple[int, int]]] = {policy: [] for policy in plan.policies}
        self.passed_over = dict.fromkeys(plan.policies, 0)
        self.generated = Counter[PolicyName]()
        self.stepped_on = Counter[PolicyName]()
        self.batches: list[tuple[PolicyName, S, int]] = []
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
        """An policy's work is done in order."""
        if isinstance(item, tuple):
            return True
        policy = getattr(item, "policy", None)
        return policy is None or all(getattr(i, "policy", None) != policy for i in self.open[:place])

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

    def a_group(self, step: S) -> Item:
        """None: it will be dropped."""
        counts = st.fixed_dictionaries({policy: st.integers(0, 6) for policy in self.plan.policies})
        return step, self.data.draw(st.none() | counts if self.plan.replacement_queries else counts)

    def fire(self, item: Item) -> None:
        match item:
            case (step, None):
                decisions = self.pipeline.group_closed(step, dict.fromkeys(POLICIES, 0), dropped=True)
                self.groups[step] += Replacement(step) not in decisions
                self.take(decisions)
            case (step, counts):
                self.groups[step] += 1
                self.close(step, counts)
            case Train(policy, step, version, count):
                self.train(policy, version, count)
                self.take(self.pipeline.trained(policy, step, count))
            case StepOptimizer(policy, step):
                self.step_optimizer(policy, step)
                self.take(self.pipeline.stepped(policy, step))
            case Publish(policy, step, version):
                assert version == self.served[policy] + 1
                self.served[policy] = version
                self.take(self.pipeline.applied(policy, step, version))
            case Save(policy, step):
                assert not self.accumulated[policy], "what is accumulated is in no checkpoint"
                self.take(self.pipeline.saved(policy, step))
            case CommitCheckpoint(step):
                self.take(self.pipeline.committed(step))
            case Evaluate(step, versions):
                assert versions == self.served and not any(isinstance(i, tuple) for i in self.open)
                self.take(self.pipeline.evaluated(step))

    def close(self, step: S, counts: dict[PolicyName, int]) -> None:
        """Each row was generated by some version that was served since the step began."""
        for policy, count in counts.items():
            for _ in range(count):
                version = self.data.draw(st.integers(self.started[step][policy], self.served[policy]))
                self.ready[policy].append((step, version))
            self.generated[policy] += count
        self.take(self.pipeline.group_closed(step, counts))

    def train(self, policy: PolicyName, version: V, count: int) -> None:
        assert version == self.trainers[policy], "another version than the trainer's was named"
        assert 1 <= count <= self.plan.micro_batch
        rows = self.ready[policy]
        rows.sort(key=lambda row: row[::-1] if self.by_version else row)
        assert len(rows) >= count, "more rows were asked for than there are"
        for _, generated_by in rows[:count]:
            staleness = version - generated_by
            assert 0 <= staleness <= self.plan.max_staleness
            self.oldest = max(self.oldest, staleness)
        self.accumulated[policy] += rows[:count]
        del rows[:count]

    def step_optimizer(self, policy: PolicyName, step: S) -> None:
        used, size = self.accumulated[policy], self.plan.global_batch.get(policy)
        assert self.groups[step] == self.plan.queries, "stepped before the step was rolled out"
        assert used
        if not self.by_version:  # else rows of later steps may have been taken for some of this one
            left = sum(s <= step for s, _ in self.ready[policy])
            assert (
                len(used) == max(size, self.passed_over[policy]) if size is not None and left else left == 0
            )
            self.passed_over[policy] = left
        self.stepped_on[policy] += len(used)
        self.batches.append((policy, step, len(used)))
        self.accumulated[policy] = []
        self.trainers[policy] = V(self.trainers[policy] + 1)


plans = st.builds(
    Plan,
    mode=st.just("async"),
    policies=st.just(POLICIES),
    first_step=st.just(S(1)),
    last_step=st.integers(1, 6).map(S),
    queries=st.integers(1, 3),
    micro_batch=st.integers(1, 5),
    save_every=st.integers(0, 4),
    evaluate_every=st.integers(0, 4),
    evaluate_first=st.booleans(),
    max_staleness=st.integers(1, 3),
    global_batch=st.dictionaries(st.sampled_from(POLICIES), st.integers(5, 12)),
    whole_step=st.sampled_from([(), (A,), POLICIES]),
    replacement_queries=st.integers(0, 2),
)


@settings(max_examples=150)
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


@settings(max_examples=100)
@given(plan=plans, data=st.data(), stop_after=st.integers(0, 60))
def test_a_stop_ends_it(plan: Plan, data: st.DataObject, stop_after: int) -> None:
    cluster = Cluster(plan, data, by_version=False)
    cluster.run(stop_after)
    started = max((d.step for d in cluster.history if isinstance(d, StartStep)), default=0)
    assert cluster.history[-1] == Finish(S(started))
    assert +cluster.stepped_on == +cluster.generated, "every sample is in one optimizer step"


def plan(**more: object) -> Plan:
    settings = {
        "mode": "async",
        "policies": (A,),
        "first_step": 1,
        "last_step": 9,
        "queries": 1,
        "micro_batch": 4,
        "max_staleness": 2,
    }
    return Plan(**{**settings, **more})  # type: ignore[arg-type]  # of plan's own types


def test_rollout_runs_ahead_as_far_as_it_may() -> None:
    pipeline = Pipeline(plan(), {A: V(0)})
    assert pipeline.start() == [StartStep(S(n), {A: V(0)}) for n in (1, 2, 3)]
    assert pipeline.group_closed(S(2), {A: 4}) == [], "a policy trains its steps in order"
    assert pipeline.group_closed(S(1), {A: 4}) == [Train(A, S(1), V(0), 4)]
    assert pipeline.trained(A, S(1), 4) == [StepOptimizer(A, S(1))]
    assert pipeline.stepped(A, S(1)) == [Publish(A, S(1), V(1)), Train(A, S(2), V(1), 4)]
    assert pipeline.trained(A, S(2), 4) == [], "one version at a time is on its way to the instances"
    assert pipeline.applied(A, S(1), V(1)) == [
        StepComplete(S(1), False), StepOptimizer(A, S(2)), StartStep(S(4), {A: V(1)}),
    ]  # fmt: skip


def test_what_is_over_a_fixed_batch_is_carried_once() -> None:
    pipeline = Pipeline(plan(micro_batch=2, global_batch={A: 4}), {A: V(0)})
    assert pipeline.start() == [StartStep(S(1), {A: V(0)}), StartStep(S(2), {A: V(0)})]
    assert pipeline.group_closed(S(1), {A: 9}) == [Train(A, S(1), V(0), 2), Train(A, S(1), V(0), 2)]
    pipeline.trained(A, S(1), 2)
    assert pipeline.trained(A, S(1), 2) == [StepOptimizer(A, S(1))]
    stepped = pipeline.stepped(A, S(1))
    assert stepped == [Publish(A, S(1), V(1)), *[Train(A, S(2), V(1), 2)] * 2, Train(A, S(2), V(1), 1)]
    complete = pipeline.applied(A, S(1), V(1))[0]
    assert isinstance(complete, StepComplete) and complete.carried == {A: 5}
    assert complete.versions == {A: 1}


def test_a_batch_that_is_not_full_waits_with_what_was_trained() -> None:
    pipeline = Pipeline(plan(micro_batch=2, global_batch={A: 6}), {A: V(0)})
    pipeline.start()
    assert pipeline.group_closed(S(1), {A: 5}) == [Train(A, S(1), V(0), 2), Train(A, S(1), V(0), 2)]
    pipeline.trained(A, S(1), 2)
    assert pipeline.trained(A, S(1), 2) == [StepComplete(S(1), False), StartStep(S(3), {A: V(0)})]
    assert pipeline.group_closed(S(2), {A: 3}) == [Train(A, S(2), V(0), 2)]
    assert pipeline.trained(A, S(2), 2) == [StepOptimizer(A, S(2))]


def test_a_dropped_group_is_replaced_until_the_limit() -> None:
    pipeline = Pipeline(plan(mode="strict", max_staleness=0, queries=2, replacement_queries=1), {A: V(0)})
    pipeline.start()
    assert pipeline.group_closed(S(1), {A: 0}, dropped=True) == [Replacement(S(1))]
    assert pipeline.group_closed(S(1), {A: 0}, dropped=True) == []
    assert pipeline.group_closed(S(1), {A: 4}) == [Train(A, S(1), V(0), 4), StartStep(S(2), {A: V(1)})]


def test_a_stopping_run_draws_no_more_queries() -> None:
    pipeline = Pipeline(plan(mode="strict", max_staleness=0, queries=2, replacement_queries=9), {A: V(0)})
    pipeline.start()
    pipeline.request_stop()
    assert Replacement(S(1)) not in pipeline.group_closed(S(1), {A: 0}, dropped=True)


def test_an_agent_that_cannot_stream_waits_for_the_step_and_no_other_does() -> None:
    whole = plan(mode="strict", max_staleness=0, policies=POLICIES, queries=2, whole_step=(A,))
    pipeline = Pipeline(whole, {A: V(0), B: V(0)})
    pipeline.start()
    assert pipeline.group_closed(S(1), {A: 4, B: 4}) == [Train(B, S(1), V(0), 4)]
    assert Train(A, S(1), V(0), 4) in pipeline.group_closed(S(1), {A: 4, B: 4})
