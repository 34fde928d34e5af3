"""Groups that no step waits for: the step that takes each of them, once its rewards are there."""

from flexmarl.actors.names import Step, Version
from flexmarl.actors.orchestrator.decisions import StartStep, StepComplete, StepOptimizer, Train
from flexmarl.actors.orchestrator.pipeline import Pipeline

from .test_pipeline_async import POLICIES, A, B, plan

S = Step
V = Version


def test_a_step_lets_groups_go_and_the_oldest_that_can_train_them_takes_them_back() -> None:
    pipeline = Pipeline(plan(queries=2, max_staleness=1), {A: V(0)})
    assert pipeline.start() == [StartStep(S(1), {A: V(0)}), StartStep(S(2), {A: V(0)})]
    assert pipeline.let_go(S(1)) == []
    assert pipeline.group_closed(S(1), {A: 4}) == [Train(A, S(1), V(0), 4)], "rolled out, without the other"
    assert pipeline.admit({A: V(0)}) == (S(1), [])
    assert pipeline.trained(A, S(1), 4) == [], "it waits for the group now"
    assert pipeline.group_closed(S(1), {A: 3}) == [Train(A, S(1), V(0), 3)]
    assert pipeline.trained(A, S(1), 3) == [StepOptimizer(A, S(1))]


def test_a_group_that_is_too_old_for_every_step_is_in_none() -> None:
    pipeline = Pipeline(plan(queries=2, max_staleness=1), {A: V(0)})
    pipeline.start()
    pipeline.let_go(S(1))
    for step in (S(1), S(2)):
        assert pipeline.step_for({A: V(0)}) == step
        pipeline.group_closed(step, {A: 4})
        if step == 2:
            pipeline.group_closed(step, {A: 4})
            pipeline.trained(A, step, 4)
        pipeline.trained(A, step, 4)
        pipeline.stepped(A, step)
        pipeline.applied(A, step, V(step))
    assert pipeline.step_for({A: V(0)}) is None and pipeline.step_for({A: V(1)}) == 3
    assert pipeline.admit({A: V(0)}) == (None, [])


def test_a_step_without_a_sample_waits_for_the_first_rewards_and_not_for_groups_that_are_dropped() -> None:
    pipeline = Pipeline(plan(max_staleness=1), {A: V(0)})
    pipeline.start()
    pipeline.let_go(S(1))
    assert pipeline.let_go(S(2)) == [] and pipeline.awaits_first_rewards == [1, 2]
    assert pipeline.admit({A: V(0)}) == (S(1), []) and pipeline.awaits_first_rewards == [2]
    assert pipeline.group_closed(S(1), {A: 4}) == [Train(A, S(1), V(0), 4)]
    assert pipeline.drop() == [], "its policy is in step 1"
    assert pipeline.trained(A, S(1), 4) == [StepOptimizer(A, S(1))]
    pipeline.stepped(A, S(1))
    assert StepComplete(S(2), False) in pipeline.applied(A, S(1), V(1))


def test_a_group_whose_steps_are_all_over_is_in_the_next_one() -> None:
    pipeline = Pipeline(plan(queries=2, save_every=1), {A: V(0)})
    pipeline.start()
    pipeline.let_go(S(1))
    pipeline.group_closed(S(1), {A: 4})
    assert pipeline.trained(A, S(1), 4) == [StepOptimizer(A, S(1))]
    assert pipeline.admit({A: V(0)}) == (S(2), [])
    assert pipeline.group_closed(S(2), {A: 2}) == []
    pipeline.stepped(A, S(1))
    assert StartStep(S(2), {A: V(1)}) in pipeline.applied(A, S(1), V(1))
    assert pipeline.group_closed(S(2), {A: 2}) == [Train(A, S(2), V(1), 4)]
    assert pipeline.group_closed(S(2), {A: 1}) == [Train(A, S(2), V(1), 1)]


def test_a_step_in_which_another_policy_has_stepped_takes_no_group_that_may_run_again_with_samples_of_both() -> (
    None
):
    pipeline = Pipeline(plan(policies=POLICIES, max_staleness=1), {A: V(0), B: V(0)})
    pipeline.start()
    pipeline.begun_at_once(1)
    pipeline.group_closed(S(1), {A: 4, B: 4})
    assert pipeline.trained(B, S(1), 4) == [StepOptimizer(B, S(1))]
    assert pipeline.admit({A: V(0)}) == (S(2), [])
    assert pipeline.trained(A, S(1), 4) == [StepOptimizer(A, S(1))], "step 1 does not wait for it"


def test_a_group_of_the_next_step_that_is_lost_with_its_host_begins_again() -> None:
    pipeline = Pipeline(plan(save_every=1), {A: V(0)})
    pipeline.start()
    pipeline.begun_at_once(1)
    pipeline.group_closed(S(1), {A: 4})
    assert pipeline.trained(A, S(1), 4) == [StepOptimizer(A, S(1))]
    assert pipeline.admit({A: V(0)}) == (S(2), [])
    pipeline.group_closed(S(2), {A: 2})
    pipeline.group_lost(S(2), {A: 2})
    pipeline.group_closed(S(2), {A: 3})
    pipeline.stepped(A, S(1))
    pipeline.applied(A, S(1), V(1))
    assert pipeline.group_closed(S(2), {A: 5}) == [Train(A, S(2), V(1), 4), Train(A, S(2), V(1), 4)]


def test_submitted_queries_take_places_of_the_next_steps_but_for_one_of_each() -> None:
    pipeline = Pipeline(plan(queries=3, max_staleness=3), {A: V(0)})
    pipeline.begun_at_once(5)
    begun = [decision.queries for decision in pipeline.start() if isinstance(decision, StartStep)]
    assert begun == [1, 1, 2, 3]


def test_groups_that_begin_at_once_fill_the_places_that_they_take_and_then_the_oldest_step() -> None:
    pipeline = Pipeline(plan(queries=3, max_staleness=1), {A: V(0)})
    pipeline.begun_at_once(6)
    begun = [decision.queries for decision in pipeline.start() if isinstance(decision, StartStep)]
    assert begun == [1, 1]
    assert [pipeline.admit({A: V(0)})[0] for _ in range(5)] == [1, 1, 2, 2, 1]
    assert pipeline.admit({A: V(1)})[0] == 3, "the next step leaves two places"


def test_a_run_that_stops_waits_for_no_first_rewards() -> None:
    pipeline = Pipeline(plan(max_staleness=1), {A: V(0)})
    pipeline.start()
    pipeline.let_go(S(1))
    pipeline.let_go(S(2))
    assert [type(decision) for decision in pipeline.request_stop()].count(StepComplete) == 2
