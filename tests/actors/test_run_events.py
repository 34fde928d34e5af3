"""Events and metrics on the wire: a union of classes, distinguished by their names."""

import re
from typing import Any, get_args

import pytest

from flexmarl.actors.messages import ConsoleApi
from flexmarl.actors.names import AgentName, PolicyName, Step, Version
from flexmarl.actors.run_events import (
    ActorEndedBadly,
    ActorGivenUp,
    ActorMoved,
    ActorRestarted,
    ActorSilent,
    CheckpointSaved,
    CheckpointSaving,
    ColumnsAwaited,
    Evaluated,
    GatewayListens,
    GroupLate,
    InstanceChanged,
    InstanceMoved,
    NodeJoined,
    NodeLost,
    NodeRefused,
    NodesAwaited,
    OpponentDrawn,
    PeerChanged,
    PolicyResumed,
    PolicySuspended,
    RewardsLate,
    RunContinued,
    RunEnded,
    RunEvent,
    RunResumed,
    RunStalled,
    RunStarted,
    SftDone,
    SinkClosed,
    SinkFailed,
    SinkOpened,
    SlotLost,
    StoreBlocked,
    StoreUnblocked,
    TrajectoryFailed,
    WeightsPathChosen,
    WeightsReloaded,
    WorkerLost,
    WorkflowBlocked,
)
from flexmarl.actors.step_metrics import StepMetrics
from flexmarl.core.errors import RemoteProtocolError
from flexmarl.core.protocol import codec
from flexmarl.core.protocol.codec import Encoder
from flexmarl.core.signature import signature_of

EVENTS: list[RunEvent] = [
    RunStarted(Step(0), "3.12", "linux", 2, 17),
    RunResumed(Step(4), "3.12", "linux", 2, 18),
    RunEnded(False, Step(9)),
    RunEnded(True, error="stopped by SIGINT", traceback="Traceback ..."),
    SftDone(PolicyName("shared"), 30, 0.25),
    Evaluated(Step(5), 1.5, {"accuracy": 0.5, "reward/sorter": 1.0}),
    CheckpointSaving(Step(5)),
    CheckpointSaved(Step(5), "runs/x/checkpoints/step_000005"),
    TrajectoryFailed(Step(5), "5:q_3", "ValueError: boom", "Traceback ..."),
    ColumnsAwaited(AgentName("sorter"), 3, "judged"),
    GroupLate(Step(3), "q7", 2, "late: the run has ended after step 3"),
    RewardsLate(AgentName("sorter"), 2, "3:q7_0_0"),
    GatewayListens("http://127.0.0.1:8000", "runs/x/gateway.key"),
    StoreBlocked("no space for 9 bytes"),
    StoreUnblocked(),
    ActorSilent("rollout-0", 12.0),
    RunStalled(
        Step(4), 31.5, ("rollout-0: 1 trajectory (5:q_0) at workflow.py:3", "store: room for samples")
    ),
    RunContinued(Step(4), 140.0),
    OpponentDrawn(Step(8), PolicyName("rival"), "player@4", Version(2), 3),
    WorkflowBlocked("workflow.py, line 7: time.sleep(2)"),
    ActorRestarted("solver-0", "process 7 killed by signal 9"),
    NodeJoined("gpu2", 64, 8),
    NodeLost("gpu1", "node gpu1 is lost: silent for over 15 s"),
    ActorGivenUp("solver-1", "node gpu1 is lost: silent for over 15 s"),
    ActorEndedBadly("rollout-0", "teardown failed: TimeoutError: not done within 1 s"),
    NodeRefused("gpu3", "tcp://10.0.0.3:1", ["recipe: workflow.py differs"]),
    NodesAwaited(["gpu1"], 2, 30.0, 600.0, "start `flexmarl node` on the other one"),
    PeerChanged("other", "refused", "it trains another task"),
    ActorMoved("solver-2", "gpu2", "node gpu1 is lost: silent for over 15 s"),
    SinkOpened("tensorboard", "tensorboard --logdir runs/first/tensorboard"),
    SinkFailed("wandb", "ConnectionError: down"),
    SinkClosed("wandb", 10, 2, 2),
    WorkerLost("rollout-0", "process 7 killed by signal 9", 2, 16),
    InstanceChanged("solver-0", PolicyName("solver"), "suspected", "process 7 killed by signal 9"),
    InstanceMoved("solver-0", PolicyName("solver"), PolicyName("judge"), "judge has 9.0 turns per instance"),
    WeightsPathChosen("solver-0", PolicyName("solver"), "shm", "the same host", {"cuda_ipc": "no device"}),
    WeightsReloaded("solver-0", PolicyName("solver"), Version(7), 0.5, 0.01, "wrong: layer 0"),
    PolicySuspended(PolicyName("solver"), "slot-0", "judge waits", 4096, 0.25, "shm"),
    PolicyResumed(PolicyName("judge"), "slot-0,slot-1", "its slots are free", 8192, 0.5, "shm"),
    SlotLost("slot-0", "process 7 killed by signal 9", "solver,judge", 3),
]


def received(endpoint: str, value: Any) -> Any:
    """``value`` as the console gets it from another process."""
    signature = signature_of(ConsoleApi, endpoint)
    assert signature is not None
    (argument,), _ = signature.arguments([codec.unpack(Encoder().pack(value))], {}, None)
    return argument


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.event)
def test_every_event_keeps_its_class_and_fields(event: RunEvent) -> None:
    assert received("event", event) == event


def test_every_class_is_named_after_its_event() -> None:
    classes = get_args(get_args(RunEvent)[0])
    assert {type(event) for event in EVENTS} == set(classes)
    for event in EVENTS:
        assert event.event == re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="event"):
        received("event", {"event": "tea_time", "step": 3})


def test_metrics_keep_their_parts() -> None:
    metrics = StepMetrics(
        Step(3),
        time_s=9.0,
        step_s=3.0,
        rollout_s=2.0,
        tokens=100,
        tokens_per_s=33.3,
        evaluation={"accuracy": 0.5},
        versions={PolicyName("shared"): Version(3)},
        figures={"failed_trajectories": 1},
        by_agent={AgentName("a"): {"reward": 0.5}, AgentName("b"): {"filtered_samples": 2}},
        by_policy={PolicyName("shared"): {"samples": 8, "loss": 0.5}},
        by_process={"store": {"rss_mib": 100.0, "mailbox_served": 3}},
    )
    assert received("step", metrics) == metrics
