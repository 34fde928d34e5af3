"""`async`, batches of a fixed size, and groups that are dropped, under every order of events."""

from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.names import PolicyName, Step, Version
from flexmarl.actors.orchestrator.decisions import (
    CarryOn,
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


@dataclass
class Loose:
    """A group that no step waits for, and the versions of its rows."""

    versions: dict[PolicyName, list[int]]


@dataclass
class Admitted:
    """Such a group, which belongs to a step again."""

    step: S
    versions: dict[PolicyName, list[int]]


@dataclass
class Carried:
    """A group that the step after its own waits for. ``counts``: None if it will be dropped."""

    step: S
    began: S
    counts: dict[PolicyName, int] | None


Item = Carried | tuple[S, dict[PolicyName, int] | None] | Loose | Admitted | Decision


class Cluster:
    """Carries decisions out in an order that ``data`` picks; rows lie in a store and know who generated them.

    ``by_version``: the store leases the oldest version first, not the oldest step. ``late``: some groups wait for their
    rewards, and queries are submitted.
    """

    def __init__(self, plan: Plan, data: st.DataObject, *, by_version: bool, late: bool = False) -> None:
        self.late, self.dropped, self.submitted = late, 0, 0
        self.waited_for = Counter[S]()
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
        self.carried = 0

    def run(self, stop_after: int | None = None) -> None:
        self.take(self.pipeline.start())
        fired = 0
        while not self.finished and (
            possible := [n for n, item in enumerate(self.open) if self.is_possible(n, item)]
        ):
            if fired == stop_after:
                self.take(self.pipeline.request_stop())
            fired += 1
            self.fire(self.open.pop(self.data.draw(st.sampled_from(possible))))
        assert all(isinstance(item, Loose) for item in self.open), "some work is never done"
        assert isinstance(self.history[-1], Finish)

    @property
    def finished(self) -> bool:
        return isinstance(self.history[-1], Finish)

    def is_possible(self, place: int, item: Item) -> bool:
        """An policy's work is done in order."""
        if isinstance(item, tuple | Loose | Admitted | Carried):
            return True
        policy = getattr(item, "policy", None)
        return policy is None or all(getattr(i, "policy", None) != policy for i in self.open[:place])

    def take(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            assert not isinstance(self.history[-1] if self.history else None, Finish)
            self.history.append(decision)
            match decision:
                case StartStep(step, versions, queries):
                    assert versions == self.served
                    assert 1 <= queries <= self.plan.queries + self.plan.extra_queries
                    self.started[step] = versions
                    self.waited_for[step] += queries
                    self.open += [self.a_group(step) for _ in range(queries)]
                case Replacement(step):
                    self.replacements[step] += 1
                    assert self.replacements[step] <= self.plan.replacement_queries
                    self.open.append(self.a_group(step))
                case CarryOn(step, count):
                    kept = [item for item in self.open if not (isinstance(item, tuple) and item[0] == step)]
                    moved = [item for item in self.open if isinstance(item, tuple) and item[0] == step]
                    assert len(moved) == count > 0
                    self.carried += count
                    self.waited_for[step] -= count
                    self.waited_for[S(step + 1)] += count
                    self.open = [*kept, *(Carried(S(step + 1), step, counts) for _, counts in moved)]
                case StepComplete(step):
                    assert self.groups[step] == self.waited_for[step]
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
                versions = {policy: self.versions(step, policy, count) for policy, count in counts.items()}
                if self.late and any(counts.values()) and self.data.draw(st.booleans()):
                    self.open.append(Loose(versions))
                    self.waited_for[step] -= 1
                    self.take(self.pipeline.let_go(step))
                    self.submit(step)
                else:
                    self.close(step, versions)
            case Carried(step, began, counts):
                versions = {
                    policy: self.versions(began, policy, count) for policy, count in (counts or {}).items()
                }
                if self.late and any(versions.values()) and self.data.draw(st.booleans()):
                    self.open.append(Loose(versions))
                    self.waited_for[step] -= 1
                    self.take(self.pipeline.let_go(step, held=True))
                else:
                    self.close(step, versions, began=began)
            case Loose(versions):
                self.admit(versions)
            case Admitted(step, versions):
                self.close(step, versions, began=step)
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

    def versions(self, step: S, policy: PolicyName, count: int) -> list[int]:
        """Each row was generated by some version that was served since the step began."""
        served = st.integers(self.started[step][policy], self.served[policy])
        return [self.data.draw(served) for _ in range(count)]

    def close(self, step: S, versions: dict[PolicyName, list[int]], began: S | None = None) -> None:
        """``began``: of a group that its step must wait for."""
        self.groups[step] += 1
        for policy, of_rows in versions.items():
            self.ready[policy] += [(began or step, version) for version in of_rows]
            self.generated[policy] += len(of_rows)
        counts = {policy: len(of_rows) for policy, of_rows in versions.items()}
        self.take(self.pipeline.group_closed(step, counts, held=began is not None))

    def submit(self, step: S) -> None:
        """A program submits queries, sometimes, which begin at once."""
        for _ in range(self.data.draw(st.integers(0, 2)) if self.submitted < 6 else 0):
            self.submitted += 1
            self.pipeline.begun_at_once(1)
            self.open.append(Loose({A: [self.served[A]]}))

    def admit(self, versions: dict[PolicyName, list[int]]) -> None:
        """Its rewards are there."""
        oldest = {policy: V(min(of_rows)) for policy, of_rows in versions.items() if of_rows}
        step, decisions = self.pipeline.admit(oldest)
        self.take(decisions)
        if step is None:
            self.dropped += 1
            self.take(self.pipeline.drop())
        else:
            self.waited_for[step] += 1
            self.open.append(Admitted(step, versions))

    def train(self, policy: PolicyName, version: V, count: int) -> None:
        assert version == self.trainers[policy], "another version than the trainer's was named"
        assert 1 <= count <= max(self.plan.micro_batch, self.plan.largest_micro_batch)
        rows = self.ready[policy]
        rows.sort(key=lambda row: row[::-1] if self.by_version else row)
        assert len(rows) >= count, "more rows were asked for than there are"
        for _, generated_by in rows[:count]:
            staleness = version - generated_by
            assert 0 <= staleness <= self.plan.max_staleness
            self.oldest = max(self.oldest, staleness)
        self.accumulated[policy] += rows[:count]
        del rows[:count]

    def brings(self, item: Item, policy: PolicyName, step: S) -> bool:
        """True if an open item is a group that may bring the policy rows of the step."""
        match item:
            case (of_step, _):
                return of_step == step
            case Carried(of_step):
                return of_step == step
            case Admitted(of_step, versions):
                return of_step == step and bool(versions.get(policy))
        return False

    def step_optimizer(self, policy: PolicyName, step: S) -> None:
        used, size = self.accumulated[policy], self.plan.global_batch.get(policy)
        assert not any(self.brings(item, policy, step) for item in self.open), (
            "stepped before it was rolled out"
        )
        assert used
        if not self.by_version and not self.plan.extra_queries:
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
    largest_micro_batch=st.integers(0, 12),
)


@settings(max_examples=75)
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


@settings(max_examples=50)
@given(plan=plans, data=st.data(), stop_after=st.integers(0, 60))
def test_a_stop_ends_it(plan: Plan, data: st.DataObject, stop_after: int) -> None:
    cluster = Cluster(plan, data, by_version=False)
    cluster.run(stop_after)
    started = max((d.step for d in cluster.history if isinstance(d, StartStep)), default=0)
    assert cluster.history[-1] == Finish(S(started))
    assert +cluster.stepped_on == +cluster.generated, "every sample is in one optimizer step"


@settings(max_examples=75)
@given(plan=plans, data=st.data(), stop_after=st.none() | st.integers(0, 60))
def test_groups_whose_rewards_come_late_are_trained_once_in_time_or_dropped(
    plan: Plan, data: st.DataObject, stop_after: int | None
) -> None:
    cluster = Cluster(plan, data, by_version=True, late=True)
    cluster.run(stop_after)
    started = max((d.step for d in cluster.history if isinstance(d, StartStep)), default=0)
    assert cluster.history[-1] == Finish(S(started))
    assert +cluster.stepped_on == +cluster.generated, "every sample is in one optimizer step"


@settings(max_examples=50)
@given(plan=plans, data=st.data(), stop_after=st.none() | st.integers(0, 60))
def test_queries_beyond_a_step_are_carried_on_once_and_trained_once(
    plan: Plan, data: st.DataObject, stop_after: int | None
) -> None:
    queries = plan.queries + 1
    extra = data.draw(st.integers(1, queries - 1))
    staleness = max(plan.max_staleness, 1 + bool(plan.global_batch))
    plan = replace(plan, queries=queries, extra_queries=extra, max_staleness=staleness, replacement_queries=0)
    cluster = Cluster(plan, data, by_version=data.draw(st.booleans()), late=data.draw(st.booleans()))
    cluster.run(stop_after)
    assert +cluster.stepped_on == +cluster.generated, "every sample is in one optimizer step"
    for step in (d.step for d in cluster.history if isinstance(d, CommitCheckpoint)):
        assert not [d for d in cluster.history if isinstance(d, CarryOn) and d.step == step], "half done"


def test_a_step_closes_with_the_first_and_the_next_one_waits_for_the_others() -> None:
    pipeline = Pipeline(plan(queries=2, extra_queries=1, max_staleness=1), {A: V(0)})
    (start,) = pipeline.start()
    assert isinstance(start, StartStep) and start.queries == 3
    assert pipeline.group_closed(S(1), {A: 4}) == [Train(A, S(1), V(0), 4)]
    assert pipeline.group_closed(S(1), {A: 4}) == [CarryOn(S(1), 1), Train(A, S(1), V(0), 4)]
    pipeline.trained(A, S(1), 4)
    assert pipeline.trained(A, S(1), 4) == [StepOptimizer(A, S(1))]
    pipeline.stepped(A, S(1))
    *_, start = pipeline.applied(A, S(1), V(1))
    assert isinstance(start, StartStep) and start.queries == 2
    pipeline.group_closed(S(2), {A: 4})
    assert pipeline.group_closed(S(2), {A: 4}) == [Train(A, S(2), V(1), 4)], "it waits for the one of step 1"
    assert pipeline.group_closed(S(2), {A: 3}, held=True) == [Train(A, S(2), V(1), 3)]


def test_a_saved_step_takes_all_groups_and_a_lost_one_is_waited_for_again() -> None:
    pipeline = Pipeline(plan(queries=2, extra_queries=1, max_staleness=1, save_every=2), {A: V(0)})
    pipeline.start()
    pipeline.group_closed(S(1), {A: 4})
    pipeline.group_closed(S(1), {A: 4})
    for _ in range(2):
        pipeline.trained(A, S(1), 4)
    assert pipeline.group_closed(S(2), {A: 2}, held=True) == [], "passed on, and closed before step 2 begins"
    pipeline.group_lost(S(2), {A: 2}, held=True)
    pipeline.stepped(A, S(1))
    *_, start = pipeline.applied(A, S(1), V(1))
    assert isinstance(start, StartStep) and start.queries == 1, "it has the place of a query"
    assert pipeline.group_closed(S(2), {A: 4}) == [Train(A, S(2), V(1), 4)]
    assert pipeline.group_closed(S(2), {A: 2}, held=True) == [Train(A, S(2), V(1), 2)]


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
