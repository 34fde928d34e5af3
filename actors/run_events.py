"""Events of a run, other than its steps. Actors and the launcher report them to the console, which logs them.

``event`` is the name in ``events.jsonl``; it tells the classes apart on the wire and in the file.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from .names import AgentName, PolicyName, Step, Version


@dataclass(frozen=True, slots=True)
class RunStarted:
    """``step``: finished steps, 0. ``pid``: the launcher's; 0 in a simulated run, whose events have virtual
    time. ``folder``: the run's."""

    step: Step
    python: str
    platform: str
    cpus: int
    pid: int
    folder: str = ""
    event: Literal["run_started"] = "run_started"


@dataclass(frozen=True, slots=True)
class RunResumed:
    """``step``: of the checkpoint that the run continues from. ``changes``: settings and files that are no longer as
    they were, by name. The other fields are as in ``RunStarted``."""

    step: Step
    python: str
    platform: str
    cpus: int
    pid: int
    folder: str = ""
    changes: dict[str, str] = field(default_factory=dict)
    event: Literal["run_resumed"] = "run_resumed"


@dataclass(frozen=True, slots=True)
class RunEnded:
    """``step``: the last one, None after a failure. ``stopped``: by a signal. ``traceback``: of a failed actor.
    ``wall_s``: seconds since the run was started or resumed. ``checkpoint``: the folder of the newest one."""

    stopped: bool
    step: Step | None = None
    error: str | None = None
    traceback: str | None = None
    wall_s: float | None = None
    checkpoint: str | None = None
    event: Literal["run_ended"] = "run_ended"


@dataclass(frozen=True, slots=True)
class SftDone:
    """A policy was fine-tuned on ``batches`` supervised batches; ``loss`` is the last one's."""

    policy: PolicyName
    batches: int
    loss: float
    event: Literal["sft_done"] = "sft_done"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation after ``step`` took ``eval_s`` seconds. ``metrics``: as in ``Evaluation``."""

    step: Step
    eval_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    event: Literal["evaluated"] = "evaluated"


@dataclass(frozen=True, slots=True)
class CheckpointSaving:
    """All policies are saved; the joint checkpoint is about to be committed."""

    step: Step
    event: Literal["checkpoint_saving"] = "checkpoint_saving"


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """The joint checkpoint of ``step`` is whole, in ``folder``: a run can be resumed from it."""

    step: Step
    folder: str
    event: Literal["checkpoint_saved"] = "checkpoint_saved"


@dataclass(frozen=True, slots=True)
class OpponentDrawn:
    """A pool of past versions plays ``step`` with ``member``, one of ``members``, such as ``player@20``: that policy
    after step 20. ``version``: of the pool's policy, which counts the changes."""

    step: Step
    policy: PolicyName
    member: str
    version: Version
    members: int
    event: Literal["opponent_drawn"] = "opponent_drawn"


@dataclass(frozen=True, slots=True)
class TrajectoryFailed:
    """A trajectory of ``step`` was dropped; the other fields are as in ``TrajectoryFailure``."""

    step: Step
    trajectory: str
    error: str
    traceback: str
    event: Literal["trajectory_failed"] = "trajectory_failed"


@dataclass(frozen=True, slots=True)
class ColumnsAwaited:
    """Training waits for an external writer: ``samples`` of the agent lack ``columns`` (comma-separated)."""

    agent: AgentName
    samples: int
    columns: str
    event: Literal["columns_awaited"] = "columns_awaited"


@dataclass(frozen=True, slots=True)
class GroupLate:
    """A group that waited for rewards from outside has ended without samples: ``trajectories`` of it are late."""

    step: Step
    query: str
    trajectories: int
    reason: str
    event: Literal["group_late"] = "group_late"


@dataclass(frozen=True, slots=True)
class RewardsLate:
    """A program outside the run has given ``rewards`` of samples that wait no longer, ``sample`` among them: they are
    left out."""

    agent: AgentName
    rewards: int
    sample: str
    event: Literal["rewards_late"] = "rewards_late"


@dataclass(frozen=True, slots=True)
class GatewayListens:
    """Services open sessions at ``url``, with the key in ``key_file``."""

    url: str
    key_file: str
    event: Literal["gateway_listens"] = "gateway_listens"


@dataclass(frozen=True, slots=True)
class StoreBlocked:
    """Writes wait for space in memory or on disk. ``problem``: the limit or the error of the disk."""

    problem: str
    event: Literal["store_blocked"] = "store_blocked"


@dataclass(frozen=True, slots=True)
class StoreUnblocked:
    """Writes continue after ``StoreBlocked``."""

    event: Literal["store_unblocked"] = "store_unblocked"


@dataclass(frozen=True, slots=True)
class ActorSilent:
    """An actor's process has not answered for ``seconds``."""

    actor: str
    seconds: float
    event: Literal["actor_silent"] = "actor_silent"


@dataclass(frozen=True, slots=True)
class RunStalled:
    """The run stands still: nothing has ended for ``seconds``. ``step``: the last complete one. ``causes``: a line
    for each thing that it waits for, and the part that has to act."""

    step: Step
    seconds: float
    causes: tuple[str, ...]
    event: Literal["run_stalled"] = "run_stalled"


@dataclass(frozen=True, slots=True)
class RunContinued:
    """Something has ended after ``RunStalled``, for the first time in ``seconds``."""

    step: Step
    seconds: float
    event: Literal["run_continued"] = "run_continued"


InstanceNews = Literal["serving", "suspected", "draining", "gone"]


@dataclass(frozen=True, slots=True)
class InstanceChanged:
    """An instance of ``policy`` gets turns (``serving``: it joined, was started again, has answered), gets none while
    it may be lost (``suspected``) or ends its last ones (``draining``), or is ``gone``."""

    instance: str
    policy: PolicyName
    state: InstanceNews
    reason: str
    event: Literal["instance_changed"] = "instance_changed"


@dataclass(frozen=True, slots=True)
class InstanceMoved:
    """An instance stops generating turns of ``policy``, and is to serve ``to``."""

    instance: str
    policy: PolicyName
    to: PolicyName
    reason: str
    event: Literal["instance_moved"] = "instance_moved"


@dataclass(frozen=True, slots=True)
class WeightsPathChosen:
    """An instance got its first weights of ``policy``, or weights by another path of the transport than before, for
    ``reason``. ``refused``: the reason against each faster path that they were offered by."""

    instance: str
    policy: PolicyName
    path: str
    reason: str
    refused: dict[str, str] = field(default_factory=dict)
    event: Literal["weights_path_chosen"] = "weights_path_chosen"


@dataclass(frozen=True, slots=True)
class WeightsReloaded:
    """An instance did not compute with ``version`` of ``policy``, and loaded it once more before it got turns. A
    probe's log-probability differed from the trainer's by ``difference``, more than ``bound``. ``wrong``: the tensors,
    in words."""

    instance: str
    policy: PolicyName
    version: Version
    difference: float
    bound: float
    wrong: str
    event: Literal["weights_reloaded"] = "weights_reloaded"


@dataclass(frozen=True, slots=True)
class PolicySuspended:
    """A policy had to leave its slots of the shared pool (comma-separated) for ``reason``. The part of its state that
    was not in the host's memory before, ``size_bytes``, was moved there in ``seconds``. ``path``: of the transport, or
    ``none`` if nothing had to be moved."""

    policy: PolicyName
    slots: str
    reason: str
    size_bytes: int
    seconds: float
    path: str
    event: Literal["policy_suspended"] = "policy_suspended"


@dataclass(frozen=True, slots=True)
class PolicyResumed:
    """A policy has slots of the shared pool (comma-separated) for ``reason``; its state, ``size_bytes``, came in
    ``seconds`` by ``path``."""

    policy: PolicyName
    slots: str
    reason: str
    size_bytes: int
    seconds: float
    path: str
    event: Literal["policy_resumed"] = "policy_resumed"


@dataclass(frozen=True, slots=True)
class SlotLost:
    """A slot worker was lost, and is restarted. ``policies``: those whose state was on it (comma-separated).
    ``repeated``: micro-batches of their steps that are trained again."""

    slot: str
    reason: str
    policies: str
    repeated: int
    event: Literal["slot_lost"] = "slot_lost"


@dataclass(frozen=True, slots=True)
class WorkflowBlocked:
    """The workflow blocked the event loop of all trajectories for a second or more. ``line``: of the recipe."""

    line: str
    event: Literal["workflow_blocked"] = "workflow_blocked"


@dataclass(frozen=True, slots=True)
class ActorRestarted:
    """An actor was lost, for ``reason``, and is restarted alone."""

    actor: str
    reason: str
    event: Literal["actor_restarted"] = "actor_restarted"


@dataclass(frozen=True, slots=True)
class ActorEndedBadly:
    """An actor did not end in good order at the run's end, such as a rollout worker whose recipe's ``teardown`` hangs
    or fails. The run's result is the same."""

    actor: str
    problem: str
    event: Literal["actor_ended_badly"] = "actor_ended_badly"


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The orchestrator has lost a rollout worker, which is restarted. ``groups``: those that are begun again.
    ``trajectories``: of these groups, and of an evaluation."""

    worker: str
    reason: str
    groups: int
    trajectories: int
    event: Literal["worker_lost"] = "worker_lost"


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A host has joined the running run: actors of lost nodes may move there."""

    node: str
    cores: int
    gpus: int
    event: Literal["node_joined"] = "node_joined"


@dataclass(frozen=True, slots=True)
class NodeRefused:
    """A host may not join the run: ``problems`` says what differs. ``address``: of the host."""

    node: str
    address: str
    problems: list[str]
    event: Literal["node_refused"] = "node_refused"


@dataclass(frozen=True, slots=True)
class NodesAwaited:
    """The run has waited for ``waited_s`` seconds, of ``wait_s`` at most, until ``wanted`` nodes are there. ``joined``:
    their names so far. ``next_step``: advice."""

    joined: list[str]
    wanted: int
    waited_s: float
    wait_s: float
    next_step: str
    event: Literal["nodes_awaited"] = "nodes_awaited"


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node has ended or is silent. Its actors are restarted on others, or given up."""

    node: str
    reason: str
    event: Literal["node_lost"] = "node_lost"


@dataclass(frozen=True, slots=True)
class SinkOpened:
    """A sink is ready; ``place``: of its figures."""

    sink: str
    place: str
    event: Literal["sink_opened"] = "sink_opened"


@dataclass(frozen=True, slots=True)
class SinkFailed:
    """The first error of a sink; later ones are counted."""

    sink: str
    error: str
    event: Literal["sink_failed"] = "sink_failed"


@dataclass(frozen=True, slots=True)
class SinkClosed:
    """The run has ended, and with it the sink. ``written``: steps and evaluations that it has got. ``lost``: those that
    it has not, because of its ``errors`` or because it was too slow."""

    sink: str
    written: int
    lost: int
    errors: int
    event: Literal["sink_closed"] = "sink_closed"


@dataclass(frozen=True, slots=True)
class ActorGivenUp:
    """The node of an actor was lost, for ``reason``, and no other one has room for it: the run continues without."""

    actor: str
    reason: str
    event: Literal["actor_given_up"] = "actor_given_up"


@dataclass(frozen=True, slots=True)
class ActorMoved:
    """The node of an actor was lost, for ``reason``, and the actor is started again on ``node``."""

    actor: str
    node: str
    reason: str
    event: Literal["actor_moved"] = "actor_moved"


@dataclass(frozen=True, slots=True)
class PeerChanged:
    """A run whose groups this one trains too (``sharing.peers``).

    ``absent``: it can't be reached; ``joined``: it shares; ``lost``: it is gone, and is looked for; ``refused``: for
    good, as for another task; ``dropped``: a group of it can't be trained, the first time that this happens.
    """

    peer: str
    state: Literal["absent", "joined", "lost", "refused", "dropped"]
    reason: str = ""
    event: Literal["peer_changed"] = "peer_changed"


RunEvent = Annotated[
    RunStarted
    | RunResumed
    | RunEnded
    | SftDone
    | Evaluated
    | CheckpointSaving
    | CheckpointSaved
    | OpponentDrawn
    | TrajectoryFailed
    | ColumnsAwaited
    | GroupLate
    | RewardsLate
    | GatewayListens
    | StoreBlocked
    | StoreUnblocked
    | ActorSilent
    | RunStalled
    | RunContinued
    | InstanceChanged
    | InstanceMoved
    | WeightsPathChosen
    | WeightsReloaded
    | PolicySuspended
    | PolicyResumed
    | SlotLost
    | WorkflowBlocked
    | ActorRestarted
    | ActorEndedBadly
    | WorkerLost
    | NodeJoined
    | NodeRefused
    | NodesAwaited
    | NodeLost
    | ActorGivenUp
    | ActorMoved
    | PeerChanged
    | SinkOpened
    | SinkFailed
    | SinkClosed,
    Field(discriminator="event"),
]
