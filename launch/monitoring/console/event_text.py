"""Events of a run as lines for the person who started it. Pure."""

from collections.abc import Mapping

from ....actors.run_events import (
    ActorEndedBadly,
    ActorGivenUp,
    ActorMoved,
    ActorRestarted,
    ActorSilent,
    CheckpointSaved,
    ColumnsAwaited,
    Evaluated,
    GatewayListens,
    InstanceChanged,
    InstanceMoved,
    NodeJoined,
    NodeLost,
    NodeRefused,
    NodesAwaited,
    PeerChanged,
    RunContinued,
    RunEvent,
    RunResumed,
    RunStalled,
    SftDone,
    SinkClosed,
    SinkFailed,
    SinkOpened,
    SlotLost,
    StoreBlocked,
    StoreUnblocked,
    TrajectoryFailed,
    WeightsReloaded,
    WorkerLost,
    WorkflowBlocked,
)
from ..formatting import count, duration


def warning_of(event: RunEvent) -> str | None:
    """The text of an event that is shown as a warning; None for the others."""
    match event:
        case TrajectoryFailed():
            return f"trajectory {event.trajectory} was dropped: {event.error}"
        case ActorSilent():
            hint = "; does the workflow block its event loop?" if event.actor.startswith("rollout-") else ""
            return f"{event.actor} has not answered for {event.seconds:g} s{hint}"
        case RunStalled():
            return f"nothing has ended for {duration(event.seconds)}, step {event.step + 1} waits for:"
        case InstanceChanged(state="suspected"):
            return f"{event.instance} may be lost, and gets no turns: {event.reason}"
        case WeightsReloaded():
            return (
                f"{event.instance} did not compute with version {event.version} of {event.policy} and loaded it again: "
                f"a log-probability differed by {event.difference:.3g}, the bound is {event.bound:g}; {event.wrong}"
            )
        case WorkflowBlocked():
            return f"the workflow blocks its event loop, so that all trajectories wait: {event.line}"
        case WorkerLost():
            again = count(event.groups, "group")
            return f"rollout worker {event.worker} was lost, {again} begun again: {event.reason}"
        case SlotLost():
            again = (
                f"{event.repeated} {'micro-batch' if event.repeated == 1 else 'micro-batches'} trained again"
            )
            return f"slot worker {event.slot} was lost, {again}: {event.reason}"
        case ActorRestarted():
            return f"{event.actor} is restarted: {event.reason}"
        case ActorEndedBadly():
            return f"{event.actor} has not ended in good order: {event.problem}"
        case NodeRefused():
            return f"node {event.node} ({event.address}) is refused: {'; '.join(event.problems)}"
        case NodesAwaited():
            names = f" ({', '.join(event.joined)})" if event.joined else ""
            return (
                f"{len(event.joined)} of {event.wanted} nodes have joined{names}: the run has waited "
                f"{event.waited_s:g} s, {event.wait_s:g} s at most (--wait-s); {event.next_step}"
            )
        case ActorMoved():
            return f"{event.actor} moves to node {event.node}: {event.reason}"
        case NodeLost():
            return event.reason
        case ActorGivenUp():
            return f"{event.actor} is given up, no other node has room for it: {event.reason}"
        case PeerChanged(state="dropped"):
            return f"a group of peer {event.peer} can't be trained: {event.reason}"
        case PeerChanged(state=state) if state != "joined":
            again = "" if state == "refused" else "; it is looked for"
            return f"peer {event.peer} is {state}: {event.reason}{again}"
        case SinkFailed():
            return f"sink {event.sink}: {event.error}"
        case SinkClosed(lost=lost) if lost:
            return f"sink {event.sink} lacks {lost} of {event.written + lost} steps and evaluations"
        case StoreBlocked():
            return f"the store waits for space: {event.problem}"
        case ColumnsAwaited():
            return (
                f"{event.samples} samples of {event.agent} wait for {event.columns}, to be written by an external "
                "writer"
            )
    return None


def note_of(event: RunEvent, total_steps: int) -> str | None:
    """The text of an event that is shown as a plain line; None for the others. ``total_steps``: of the run, 0 if it
    evaluates alone."""
    match event:
        case Evaluated() if not total_steps:
            return f"evaluation: {figures(event.metrics)}"
        case Evaluated(step=0):
            return f"before training: {figures(event.metrics)}"
        case Evaluated():
            return f"after step {event.step}: {figures(event.metrics)}"
        case CheckpointSaved():
            return f"checkpoint saved: {event.folder}"
        case SftDone():
            return f"{event.policy} fine-tuned on {event.batches} supervised batches, loss {event.loss:.3f}"
        case RunResumed() if event.changes:
            return f"changed: {', '.join(f'{name} {how}' for name, how in event.changes.items())}"
        case PeerChanged(state="joined"):
            return f"peer {event.peer} shares its groups"
        case InstanceChanged(state="serving"):
            return f"{event.instance} serves {event.policy}: {event.reason}"
        case InstanceChanged(state="draining"):
            return f"{event.instance} gets no more turns of {event.policy}: {event.reason}"
        case InstanceMoved():
            return f"{event.instance} moves from {event.policy} to {event.to}: {event.reason}"
        case NodeJoined():
            return f"node {event.node} joined: {count(event.cores, 'core')}, {count(event.gpus, 'GPU')}"
        case SinkOpened():
            return f"sink {event.sink}: {event.place}"
        case GatewayListens():
            return f"sessions are opened at {event.url}/sessions, with the key in {event.key_file}"
        case StoreUnblocked():
            return "the store has space again"
        case RunContinued():
            return f"the run continues after {duration(event.seconds)}"
    return None


def figures(metrics: Mapping[str, float]) -> str:
    """All metrics of an evaluation by name: ``accuracy 0.250, reward/sorter 0.125``."""
    return ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
