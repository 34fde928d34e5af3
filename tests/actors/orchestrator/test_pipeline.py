"""The pipeline under every order of events: a model carries its decisions out at random."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.errors import ProtocolViolation, SamplesLost
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

A, B, C = map(PolicyName, "abc")
PLAN = Plan(
    mode="strict", policies=(A, B), first_step=S(1), last_step=S(4), queries=3, micro_batch=4, save_every=2
)


class Cluster:
    """Carries decisions out in an order that ``draw`` picks, and checks what must hold whenever one fires."""

    def __init__(
        self, plan: Plan, data: st.DataObject, samples: st.SearchStrategy[dict[PolicyName, int]]
    ) -> None:
        self.plan = plan
        self.data = data
        self.samples = samples
        self.served = dict.fromkeys(plan.policies, V(0))
        self.pipeline = Pipeline(plan, self.served)
        self.open: list[tuple[str, Decision | tuple[S, dict[PolicyName, int]]]] = []
        self.history: list[Decision] = []
        self.rows: Counter[tuple[S, PolicyName]] = Counter()
        self.trained: Counter[tuple[S, PolicyName]] = Counter()
        self.groups_open: Counter[S] = Counter()
        self.versions_of: dict[S, dict[PolicyName, V]] = {}
        self.trained_while_rolling = 0

    def run(self, stop_after: int | None = None) -> None:
        self.take(self.pipeline.start())
        fired = 0
        while possible := [n for n, item in enumerate(self.open) if self.is_possible(item)]:
            if fired == stop_after:
                self.take(self.pipeline.request_stop())
            fired += 1
            self.fire(self.open.pop(self.data.draw(st.sampled_from(possible))))

    def is_possible(self, item: tuple[str, Decision | tuple[S, dict[PolicyName, int]]]) -> bool:
        """A group closes only when the versions its turns need are served; a policy's work is done in order."""
        kind, what = item
        if kind == "group":
            step, counts = what  # type: ignore[misc]
            return all(self.served[a] == self.versions_of[step][a] for a, n in counts.items() if n)
        earlier = self.open[: self.open.index(item)]
        policy = getattr(what, "policy", None)
        return not any(
            kind == "do" and policy is not None and getattr(w, "policy", None) == policy
            for kind, w in earlier
        )

    def take(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            self.history.append(decision)
            match decision:
                case StartStep(step, versions):
                    self.versions_of[step] = versions
                    self.groups_open[step] = self.plan.queries
                    for _ in range(self.plan.queries):
                        self.open.append(("group", (step, self.data.draw(self.samples))))
                case Train(policy, step, version, count):
                    assert version == self.versions_of[step][policy] == self.served[policy], "off-policy"
                    assert 1 <= count <= most_of(self.plan)
                    if self.groups_open[step]:
                        self.trained_while_rolling += 1
                        assert self.plan.mode == "strict" and count % self.plan.micro_batch == 0
                    self.open.append(("do", decision))
                case StepComplete() | Finish():
                    pass
                case Evaluate(step, versions):
                    assert versions == self.served, "an evaluation sees one joint version"
                    assert not any(self.groups_open.values())
                    self.open.append(("do", decision))
                case _:
                    self.open.append(("do", decision))

    def fire(self, item: tuple[str, Decision | tuple[S, dict[PolicyName, int]]]) -> None:
        kind, what = item
        if kind == "group":
            step, counts = what  # type: ignore[misc]
            self.groups_open[step] -= 1
            for policy, count in counts.items():
                self.rows[step, policy] += count
            self.take(self.pipeline.group_closed(step, counts))
            return
        match what:
            case Train(policy, step, _, count):
                self.trained[step, policy] += count
                self.take(self.pipeline.trained(policy, step, count))
            case StepOptimizer(policy, step):
                assert self.groups_open[step] == 0, "stepped before the global batch was complete"
                assert self.trained[step, policy] == self.rows[step, policy] > 0
                self.take(self.pipeline.stepped(policy, step))
            case Publish(policy, step, version):
                self.served[policy] = version
                self.take(self.pipeline.applied(policy, step, version))
            case Save(policy, step):
                assert not [t for t in self.trained if t[1] == policy and t[0] > step], (
                    "saved state is a later step's"
                )
                self.take(self.pipeline.saved(policy, step))
            case CommitCheckpoint(step):
                self.take(self.pipeline.committed(step))
            case Evaluate(step):
                self.take(self.pipeline.evaluated(step))

    def of(self, kind: type[Decision]) -> list[Decision]:
        return [decision for decision in self.history if isinstance(decision, kind)]


plans = st.builds(
    Plan,
    mode=st.sampled_from(["strict", "sync"]),
    policies=st.sampled_from([(A,), (A, B), (A, B, C)]),
    first_step=st.just(S(1)),
    last_step=st.integers(1, 5).map(S),
    queries=st.integers(1, 4),
    micro_batch=st.integers(1, 7),
    save_every=st.integers(0, 3),
    evaluate_every=st.integers(0, 3),
    evaluate_first=st.booleans(),
    barrier=st.sampled_from(["policy", "step"]),
    largest_micro_batch=st.integers(0, 20),
)


def most_of(plan: Plan) -> int:
    """The most samples of a computation."""
    return max(plan.micro_batch, plan.largest_micro_batch)


def samples_of(plan: Plan) -> st.SearchStrategy[dict[PolicyName, int]]:
    return st.fixed_dictionaries({policy: st.integers(0, 6) for policy in plan.policies})


@settings(max_examples=150)
@given(plan=plans, data=st.data())
def test_every_order_trains_everything_once_and_ends(plan: Plan, data: st.DataObject) -> None:
    cluster = Cluster(plan, data, samples_of(plan))
    cluster.run()
    assert isinstance(cluster.history[-1], Finish)
    assert cluster.history[-1].last_step == plan.last_step
    assert [d.step for d in cluster.of(StartStep)] == list(range(1, plan.last_step + 1))  # type: ignore[union-attr]
    assert sorted(d.step for d in cluster.of(StepComplete)) == list(range(1, plan.last_step + 1))  # type: ignore[union-attr]
    assert +cluster.trained == +cluster.rows
    steps_with_rows = Counter(policy for step, policy in +cluster.rows)
    assert cluster.served == {policy: steps_with_rows[policy] for policy in plan.policies}
    saved = {s for s in range(1, plan.last_step + 1) if plan.save_every and s % plan.save_every == 0} | {
        plan.last_step
    }
    assert {d.step for d in cluster.of(CommitCheckpoint)} == saved  # type: ignore[union-attr]
    assert len(cluster.of(Save)) == len(saved) * len(plan.policies)
    evaluated = [d.step for d in cluster.of(Evaluate)]  # type: ignore[union-attr]
    assert evaluated[-1] == plan.last_step and evaluated == sorted(set(evaluated))
    assert (0 in evaluated) == plan.evaluate_first


@settings(max_examples=150)
@given(plan=plans, data=st.data(), stop_after=st.integers(0, 60))
def test_a_stop_ends_with_a_checkpoint_of_the_last_step(
    plan: Plan, data: st.DataObject, stop_after: int
) -> None:
    cluster = Cluster(plan, data, samples_of(plan))
    cluster.run(stop_after)
    last = cluster.history[-1]
    assert isinstance(last, Finish)
    started = [d.step for d in cluster.of(StartStep)]  # type: ignore[union-attr]
    assert last.last_step == max(started, default=0)
    assert +cluster.trained == +cluster.rows
    if started:
        assert last.last_step in {d.step for d in cluster.of(CommitCheckpoint)}  # type: ignore[union-attr]


def test_strict_trains_while_rollouts_of_the_step_still_run() -> None:
    pipeline = Pipeline(PLAN, {A: V(0), B: V(0)})
    assert pipeline.start() == [StartStep(S(1), {A: V(0), B: V(0)})]
    assert pipeline.group_closed(S(1), {A: 4, B: 2}) == [Train(A, S(1), V(0), 4)]
    assert pipeline.trained(A, S(1), 4) == []
    assert pipeline.group_closed(S(1), {A: 4, B: 2}) == [Train(A, S(1), V(0), 4), Train(B, S(1), V(0), 4)]


def test_sync_waits_for_the_whole_step() -> None:
    pipeline = Pipeline(replace(PLAN, mode="sync"), {A: V(0), B: V(0)})
    pipeline.start()
    assert pipeline.group_closed(S(1), {A: 4, B: 2}) == []
    assert pipeline.group_closed(S(1), {A: 4, B: 2}) == []
    decisions = pipeline.group_closed(S(1), {A: 1, B: 0})
    assert [d for d in decisions if isinstance(d, Train)] == [
        Train(A, S(1), V(0), 4), Train(A, S(1), V(0), 4), Train(A, S(1), V(0), 1), Train(B, S(1), V(0), 4),
    ]  # fmt: skip
    assert not any(isinstance(d, StartStep) for d in decisions)


def test_the_next_step_starts_when_the_last_is_rolled_out_and_names_the_versions_to_come() -> None:
    pipeline = Pipeline(PLAN, {A: V(5), B: V(7)})
    pipeline.start()
    for _ in range(2):
        pipeline.group_closed(S(1), {A: 4, B: 0})
    assert StartStep(S(2), {A: V(6), B: V(7)}) in pipeline.group_closed(S(1), {A: 4, B: 0})


def test_with_a_barrier_of_the_step_the_next_one_starts_when_all_versions_are_served() -> None:
    pipeline = Pipeline(replace(PLAN, barrier="step", save_every=0), {A: V(0), B: V(0)})
    pipeline.start()
    decisions = [decision for _ in range(3) for decision in pipeline.group_closed(S(1), {A: 4, B: 4})]
    for policy in (A, B):
        for _ in range(3):
            decisions += pipeline.trained(policy, S(1), 4)
    assert sum(isinstance(decision, StepOptimizer) for decision in decisions) == 2
    decisions += pipeline.stepped(A, S(1)) + pipeline.stepped(B, S(1)) + pipeline.applied(A, S(1), V(1))
    assert not any(isinstance(decision, StartStep) for decision in decisions)
    assert StartStep(S(2), {A: V(1), B: V(1)}) in pipeline.applied(B, S(1), V(1))


def test_impossible_events_are_refused() -> None:
    pipeline = Pipeline(PLAN, {A: V(0), B: V(0)})
    pipeline.start()
    with pytest.raises(ProtocolViolation, match="step 2 is not under way"):
        pipeline.group_closed(S(2), {A: 1})
    with pytest.raises(ProtocolViolation, match="1 samples trained, 0 sent"):
        pipeline.trained(A, S(1), 1)
    with pytest.raises(ProtocolViolation, match="did not ask"):
        pipeline.stepped(A, S(1))


# ----------------------------------------------------------------------- samples that are lost with their host


def test_a_group_that_is_lost_is_trained_when_it_has_closed_again() -> None:
    pipeline = Pipeline(PLAN, {A: V(0), B: V(0)})
    pipeline.start()
    assert pipeline.group_closed(S(1), {A: 2, B: 2}) == []
    assert pipeline.group_closed(S(1), {A: 2, B: 2}) == [Train(A, S(1), V(0), 4), Train(B, S(1), V(0), 4)]
    pipeline.group_lost(S(1), {A: 2, B: 2})
    assert pipeline.not_trained(A, S(1), 4) == pipeline.not_trained(B, S(1), 4) == []
    assert pipeline.group_closed(S(1), {A: 1, B: 2}) == [Train(B, S(1), V(0), 4)]
    decisions = pipeline.group_closed(S(1), {A: 2, B: 0})
    assert Train(A, S(1), V(0), 4) in decisions and Train(A, S(1), V(0), 1) in decisions


def test_rows_that_can_not_be_read_now_are_asked_for_again() -> None:
    pipeline = Pipeline(PLAN, {A: V(0), B: V(0)})
    pipeline.start()
    asked = pipeline.group_closed(S(1), {A: 4, B: 0})
    assert asked == [Train(A, S(1), V(0), 4)] == pipeline.not_trained(A, S(1), 4)


def test_a_group_that_is_lost_after_the_next_step_has_begun_gets_no_replacement() -> None:
    """The next step's queries are drawn: a query that came after them would be given again by a resumed run."""
    plan = replace(PLAN, replacement_queries=3)
    pipeline = Pipeline(plan, {A: V(0), B: V(0)})
    pipeline.start()
    assert pipeline.group_closed(S(1), {A: 0, B: 0}, dropped=True) == [Replacement(S(1))]
    decisions = [
        pipeline.group_closed(S(1), samples) for samples in ({A: 4, B: 0}, {A: 0, B: 2}, {A: 0, B: 2})
    ]
    assert StartStep(S(2), {A: V(1), B: V(1)}) in decisions[-1]
    pipeline.group_lost(S(1), {A: 0, B: 2})
    assert Replacement(S(1)) not in pipeline.group_closed(S(1), {A: 0, B: 0}, dropped=True)


def test_a_group_that_is_lost_after_a_policy_has_stepped_ends_the_run() -> None:
    pipeline = Pipeline(PLAN, {A: V(0), B: V(0)})
    pipeline.start()
    for samples in ({A: 4, B: 0}, {A: 0, B: 2}, {A: 0, B: 2}):
        pipeline.group_closed(S(1), samples)
    assert StepOptimizer(A, S(1)) in pipeline.trained(A, S(1), 4)
    with pytest.raises(SamplesLost, match="after a has trained the step: .* last checkpoint"):
        pipeline.group_lost(S(1), {A: 0, B: 2})
