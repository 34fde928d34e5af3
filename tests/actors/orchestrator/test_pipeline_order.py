"""What a checkpoint and the lines of the metrics may rely on: the order of decisions across steps."""

from flexmarl.actors.orchestrator.pipeline import (
    CommitCheckpoint,
    Decision,
    Evaluate,
    Finish,
    Pipeline,
    Plan,
    Publish,
    Save,
    StartStep,
    StepComplete,
    StepOptimizer,
    Train,
)


def plan(**more: object) -> Plan:
    settings = {
        "mode": "strict",
        "agents": ("a", "b"),
        "first_step": 1,
        "last_step": 4,
        "queries": 1,
        "micro_batch": 4,
    }
    return Plan(**{**settings, **more})  # type: ignore[arg-type]  # of plan's own types


def finish_step(pipeline: Pipeline, agent: str, step: int, version: int) -> list[Decision]:
    """All that follows an agent's last micro-batch, its save included."""
    decisions = pipeline.stepped(agent, step)
    for decision in list(decisions):
        match decision:
            case Publish():
                decisions += pipeline.applied(agent, step, version)
            case Save():
                decisions += pipeline.saved(agent, step)
    return decisions


def test_an_agent_without_samples_is_done_only_after_its_step_before() -> None:
    """b trains step 1 while a alone is called in step 2: b's state after step 2 is its state after step 1."""
    pipeline = Pipeline(plan(save_every=2), {"a": 0, "b": 0})
    pipeline.start()
    pipeline.group_closed(1, {"a": 4, "b": 4})
    assert pipeline.trained("a", 1, 4) == [StepOptimizer("a", 1)]
    finish_step(pipeline, "a", 1, version=1)
    assert pipeline.group_closed(2, {"a": 4, "b": 0}) == [Train("a", 2, 1, 4)]
    pipeline.trained("a", 2, 4)
    after_a = finish_step(pipeline, "a", 2, version=2)
    assert not any(isinstance(d, StepComplete | CommitCheckpoint) or d == Save("b", 2) for d in after_a)

    assert pipeline.trained("b", 1, 4) == [StepOptimizer("b", 1)]
    after_b = finish_step(pipeline, "b", 1, version=1)
    assert [d for d in after_b if isinstance(d, StepComplete | Save | StartStep)] == [
        StepComplete(1, False), Save("b", 2), StepComplete(2, False), StartStep(3, {"a": 2, "b": 1}),
    ]  # fmt: skip
    assert pipeline.saved("b", 2) == [CommitCheckpoint(2, {"a": 2, "b": 1})]


def test_a_checkpoint_is_committed_after_its_step_is_complete_and_evaluated() -> None:
    pipeline = Pipeline(plan(agents=("a",), last_step=2, save_every=1, evaluate_every=1), {"a": 0})
    pipeline.start()
    pipeline.group_closed(1, {"a": 4})
    pipeline.trained("a", 1, 4)
    assert pipeline.stepped("a", 1) == [Publish("a", 1, 1), Save("a", 1)]
    assert pipeline.saved("a", 1) == []
    assert pipeline.applied("a", 1, 1) == [StepComplete(1, True), Evaluate(1, {"a": 1})]
    assert pipeline.evaluated(1) == [CommitCheckpoint(1, {"a": 1}), StartStep(2, {"a": 1})]


def test_a_stop_during_an_evaluation_waits_for_it() -> None:
    pipeline = Pipeline(plan(agents=("a",), save_every=1, evaluate_every=1), {"a": 0})
    pipeline.start()
    pipeline.group_closed(1, {"a": 4})
    pipeline.trained("a", 1, 4)
    pipeline.stepped("a", 1)
    pipeline.applied("a", 1, 1)
    pipeline.saved("a", 1)
    assert pipeline.request_stop() == []
    assert pipeline.evaluated(1) == [CommitCheckpoint(1, {"a": 1})]
    assert pipeline.committed(1) == [Finish(1)]
