"""The order of decisions across steps, on which checkpoints and the lines of the metrics rely."""

from flexmarl.actors.names import PolicyName, Step, Version
from flexmarl.actors.orchestrator.decisions import (
    CommitCheckpoint,
    Decision,
    Evaluate,
    Finish,
    Publish,
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


def plan(**more: object) -> Plan:
    settings = {
        "mode": "strict",
        "policies": (A, B),
        "first_step": 1,
        "last_step": 4,
        "queries": 1,
        "micro_batch": 4,
    }
    return Plan(**{**settings, **more})  # type: ignore[arg-type]  # of plan's own types


def finish_step(pipeline: Pipeline, policy: PolicyName, step: S, version: V) -> list[Decision]:
    """All that follows a policy's last micro-batch, its save included."""
    decisions = pipeline.stepped(policy, step)
    for decision in list(decisions):
        match decision:
            case Publish():
                decisions += pipeline.applied(policy, step, version)
            case Save():
                decisions += pipeline.saved(policy, step)
    return decisions


def test_an_agent_without_samples_is_done_only_after_its_step_before() -> None:
    """b trains step 1 while a alone is called in step 2: b's state after step 2 is its state after step 1."""
    pipeline = Pipeline(plan(save_every=2), {A: V(0), B: V(0)})
    pipeline.start()
    pipeline.group_closed(S(1), {A: 4, B: 4})
    assert pipeline.trained(A, S(1), 4) == [StepOptimizer(A, S(1))]
    finish_step(pipeline, A, S(1), version=V(1))
    assert pipeline.group_closed(S(2), {A: 4, B: 0}) == [Train(A, S(2), V(1), 4)]
    pipeline.trained(A, S(2), 4)
    after_a = finish_step(pipeline, A, S(2), version=V(2))
    assert not any(isinstance(d, StepComplete | CommitCheckpoint) or d == Save(B, S(2)) for d in after_a)

    assert pipeline.trained(B, S(1), 4) == [StepOptimizer(B, S(1))]
    after_b = finish_step(pipeline, B, S(1), version=V(1))
    assert [d for d in after_b if isinstance(d, StepComplete | Save | StartStep)] == [
        StepComplete(S(1), False), Save(B, S(2)), StepComplete(S(2), False), StartStep(S(3), {A: V(2), B: V(1)}),
    ]  # fmt: skip
    assert pipeline.saved(B, S(2)) == [CommitCheckpoint(S(2), {A: V(2), B: V(1)})]


def test_rows_that_wait_are_joined_up_to_the_largest_micro_batch() -> None:
    pipeline = Pipeline(plan(policies=(A,), queries=7, largest_micro_batch=9), {A: V(0)})
    pipeline.start()
    assert pipeline.group_closed(S(1), {A: 6}) == [Train(A, S(1), V(0), 4)]
    assert pipeline.group_closed(S(1), {A: 6}) == [Train(A, S(1), V(0), 8)]
    assert pipeline.group_closed(S(1), {A: 4}) == [Train(A, S(1), V(0), 4)]
    assert pipeline.group_closed(S(1), {A: 6}) == [], "three are under way"
    assert pipeline.group_closed(S(1), {A: 6}) == []
    assert pipeline.trained(A, S(1), 4) == [Train(A, S(1), V(0), 8)], "whole ones, although 9 may be joined"
    assert pipeline.group_closed(S(1), {A: 1}) == []
    assert pipeline.not_trained(A, S(1), 8) == [Train(A, S(1), V(0), 8)], "as many are sent again"
    assert not [d for d in pipeline.group_closed(S(1), {A: 0}) if isinstance(d, Train)], "three are under way"
    assert pipeline.trained(A, S(1), 8) == [Train(A, S(1), V(0), 5)], (
        "the last of a step may be a part of one"
    )
    assert pipeline.trained(A, S(1), 4) == pipeline.trained(A, S(1), 8) == []
    assert pipeline.trained(A, S(1), 5) == [StepOptimizer(A, S(1))]


def test_with_one_computation_under_way_all_rows_that_come_meanwhile_are_the_next() -> None:
    pipeline = Pipeline(plan(policies=(A,), queries=4, largest_micro_batch=16, most_under_way=1), {A: V(0)})
    pipeline.start()
    assert pipeline.group_closed(S(1), {A: 4}) == [Train(A, S(1), V(0), 4)]
    assert pipeline.group_closed(S(1), {A: 4}) == pipeline.group_closed(S(1), {A: 4}) == []
    assert pipeline.trained(A, S(1), 4) == [Train(A, S(1), V(0), 8)]


def test_a_checkpoint_is_committed_after_its_step_is_complete_and_evaluated() -> None:
    pipeline = Pipeline(plan(policies=(A,), last_step=S(2), save_every=1, evaluate_every=1), {A: V(0)})
    pipeline.start()
    pipeline.group_closed(S(1), {A: 4})
    pipeline.trained(A, S(1), 4)
    assert pipeline.stepped(A, S(1)) == [Publish(A, S(1), V(1)), Save(A, S(1))]
    assert pipeline.saved(A, S(1)) == []
    assert pipeline.applied(A, S(1), V(1)) == [StepComplete(S(1), True), Evaluate(S(1), {A: V(1)})]
    assert pipeline.evaluated(S(1)) == [CommitCheckpoint(S(1), {A: V(1)}), StartStep(S(2), {A: V(1)})]


def test_a_stop_during_an_evaluation_waits_for_it() -> None:
    pipeline = Pipeline(plan(policies=(A,), save_every=1, evaluate_every=1), {A: V(0)})
    pipeline.start()
    pipeline.group_closed(S(1), {A: 4})
    pipeline.trained(A, S(1), 4)
    pipeline.stepped(A, S(1))
    pipeline.applied(A, S(1), V(1))
    pipeline.saved(A, S(1))
    assert pipeline.request_stop() == []
    assert pipeline.evaluated(S(1)) == [CommitCheckpoint(S(1), {A: V(1)})]
    assert pipeline.committed(S(1)) == [Finish(S(1))]
