"""Errors of the roles: recipes, samples, policies, engines, checkpoints."""

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final, Literal

from ..core.errors import FlexmarlError

_LAST_LINES: Final = 5
_LONGEST_LINE: Final = 300


class ConfigError(FlexmarlError):
    """The configuration is refused; the message names the key, the value and what is allowed."""


class RecipeError(FlexmarlError):
    """The recipe and the config don't fit each other: no trajectory of the run can succeed."""


class DataChanged(FlexmarlError):
    """A resumed run would draw other queries than the run that its checkpoint is of."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"the data has changed since the checkpoint was made: {problem}; restore the data, or continue with it by "
            "--accept data"
        )
        self.problem = problem


class InvalidReward(FlexmarlError):
    """A workflow returned a reward that is not a finite number."""


class InvalidColumn(FlexmarlError):
    """A workflow wrote what a column of a turn's sample does not take, wrote it twice, or left out a required one."""


class NotJudged(FlexmarlError):
    """A reward that a program outside the run gives did not come in time: the trajectory fails, or is late.

    ``limit``: the setting and its value."""

    def __init__(self, agent: str, sample_id: str, limit: str) -> None:
        super().__init__(
            f"agent {agent}: no reward for sample {sample_id} within {limit}: it is written from outside the run; is "
            "the judge running?"
        )
        self.agent = agent
        self.sample_id = sample_id
        self.limit = limit


SessionFate = Literal["expired", "closed", "lost"]


class SessionUnrewarded(FlexmarlError):
    """A session that a program outside the run has opened ended without rewards: its trajectory is late."""

    def __init__(self, fate: SessionFate, problem: str) -> None:
        super().__init__(f"{fate}: {problem}")
        self.fate = fate
        self.problem = problem


class LimitReached(FlexmarlError):
    """An agent was asked for a turn beyond one of its trajectory's limits. A workflow that catches it and returns
    rewards ends its trajectory there; otherwise the trajectory fails.

    ``key``: the setting. ``limit``: its value, in turns or generated tokens.
    """

    def __init__(self, agent: str, key: str, limit: int) -> None:
        super().__init__(
            f"agent {agent}: no further turn, the trajectory has reached {key}={limit}; catch LimitReached to give it "
            "rewards, or raise the limit"
        )
        self.agent = agent
        self.key = key
        self.limit = limit


class InvalidEnvironment(FlexmarlError):
    """An environment returned neither prompts nor rewards, or was used after its end: its trajectory fails."""


class ProcessFailed(FlexmarlError):
    """A function of ``in_process`` raised, or its process has ended. ``problem``: the error's class and text, or the
    end. ``remote_traceback``: of the error; empty if the process has ended."""

    def __init__(self, function: str, problem: str, remote_traceback: str = "") -> None:
        super().__init__(f"{function}: {problem}")
        self.function = function
        self.problem = problem
        self.remote_traceback = remote_traceback
        if remote_traceback:
            self.add_note(f"In its process:\n{remote_traceback.rstrip()}")


class SandboxFailed(FlexmarlError):
    """A command of ``run_in_sandbox`` could not be run. ``sandbox``: the name of its kind. ``problem``: the reason."""

    def __init__(self, sandbox: str, problem: str) -> None:
        super().__init__(f"sandbox {sandbox}: {problem}")
        self.sandbox = sandbox
        self.problem = problem


class ProgramFailed(FlexmarlError):
    """A program that played a trajectory has ended badly. ``status``: of its exit. ``output``: of the program."""

    def __init__(self, command: str, how: str, status: int, output: str, refusal: str = "") -> None:
        """``how``: it has ended. ``refusal``: the last one that it got from its session; empty without one."""
        refused = f"; the gateway's last refusal: {refusal}" if refusal else ""
        lines = [line[-_LONGEST_LINE:] for line in output.strip().splitlines()[-_LAST_LINES:]]
        last = "\n".join(["; its last lines:", *lines]) if lines else ""
        super().__init__(f"the program {command} {how}{refused}{last}")
        self.command = command
        self.how = how
        self.status = status
        self.output = output
        self.refusal = refusal


class ToolFailed(FlexmarlError):
    """A tool of a server reports an error, or gave no result in time: the agent that called it reads why."""


class ToolServerLost(FlexmarlError):
    """A server of tools does not start, has ended, or has other tools than at its start: the trajectory that needs it
    fails. ``server``: its name. ``problem``: in the words of its library."""

    def __init__(self, server: str, problem: str) -> None:
        super().__init__(f"the tool server {server}: {problem}")
        self.server = server
        self.problem = problem


class TooManyFailures(FlexmarlError):
    """More trajectories of a step failed than the config allows."""


class ProtocolViolation(FlexmarlError):
    """An event that can't happen in the state the pipeline is in: a defect, never a user's mistake."""


class ComputationOverran(FlexmarlError):
    """A computation of the trainer has not ended within its deadline: a kernel, a collective or a disk hangs, or the
    work is larger than the deadline allows."""

    def __init__(self, computation: str, timeout_s: float) -> None:
        super().__init__(
            f"{computation} has not ended within training.compute_timeout_s={timeout_s:g}: if that work takes so long, "
            "raise it, or lower training.micro_batch; if not, the log of the trainer or slot worker may show more"
        )
        self.computation = computation
        self.timeout_s = timeout_s


class TooManyTokens(FlexmarlError):
    """A device has too little memory for the activations of a policy's forward. ``problem``: PyTorch's words."""

    def __init__(self, policy: str, tokens: int, problem: str) -> None:
        super().__init__(
            f"policy {policy}: the device has too little memory for a forward and backward of up to {tokens} tokens: "
            f"lower trainer.tokens_per_forward={tokens}, set trainer.activation_checkpointing=true, or divide the "
            f"policy over more slots (trainer.ranks). {problem}"
        )
        self.policy = policy
        self.tokens = tokens
        self.problem = problem


class NoRoomForState(FlexmarlError):
    """A device has too little memory for the training state of a policy. ``problem``: PyTorch's words."""

    def __init__(self, policy: str, problem: str) -> None:
        super().__init__(
            f"policy {policy}: the device has too little memory for its weights, gradients and moments: set "
            f"pool.states_per_slot=1, so that no other policy's state lies beside it, or divide it over more slots "
            f"(trainer.ranks). {problem}"
        )
        self.policy = policy
        self.problem = problem


class GangTooLarge(FlexmarlError):
    """A policy has more ranks than the training pool has slots: it could never be bound."""

    def __init__(self, policy: str, ranks: int, slots: int) -> None:
        super().__init__(f"policy {policy} has {ranks} ranks, but the training pool has {slots} slots")
        self.policy = policy
        self.ranks = ranks
        self.slots = slots


class GangIncomplete(FlexmarlError):
    """Ranks of a gang have not come to its meeting in time. ``address``: of the meeting, HOST:PORT."""

    def __init__(self, missing: Sequence[int], size: int, address: str, timeout_s: float) -> None:
        ranks = ", ".join(map(str, missing)) or "the first one, which serves it"
        super().__init__(
            f"of the {size} ranks of a policy these have not come to {address} within {timeout_s:g} s: {ranks}. "
            "Their processes hang or load for long, or a firewall keeps their hosts from that port"
        )
        self.missing = tuple(missing)
        self.size = size
        self.address = address
        self.timeout_s = timeout_s


class WeightsNotGathered(FlexmarlError):
    """A rank of a gang was lost, or hangs, while the policy's weights were gathered from all of them. ``rank``: the one
    whose rows were to be sent or received. ``tensor``: the weight."""

    def __init__(self, rank: int, tensor: str, reason: str) -> None:
        super().__init__(f"rank {rank} of the gang has not sent or received its rows of {tensor}: {reason}")
        self.rank = rank
        self.tensor = tensor
        self.reason = reason


class PlainGang(ConfigError):
    """The ranks of a policy lie on several hosts, and the run's network is not one where all machines are trusted."""

    def __init__(self, policy: str) -> None:
        super().__init__(
            f"the ranks of policy {policy} lie on several hosts, and a process group is not encrypted: write "
            "network.bulk=trusted if all machines of that network are, else hosts.spread=false"
        )
        self.policy = policy


class StateTooLarge(FlexmarlError):
    """The training state of a policy does not fit a slot of the training pool."""

    def __init__(
        self,
        policy: str,
        base_bytes: int,
        gradient_bytes: int,
        frozen_bytes: int,
        ranks: int,
        slot_bytes: int,
    ) -> None:
        """All bytes are of one slot. ``frozen_bytes``: the base of a LoRA policy. ``ranks``: the fewest slots that the
        policy is divided over."""
        needed_bytes = base_bytes + gradient_bytes + frozen_bytes
        divided = f" (divided over {ranks})" if ranks > 1 else ""
        frozen = f", {frozen_bytes} of the base of its adapter" if frozen_bytes else ""
        ranks_too = "" if frozen_bytes else "more ranks (trainer.ranks, trainer.min_ranks) or "
        super().__init__(
            f"the training state of policy {policy} takes {needed_bytes} bytes on a slot{divided}, which has "
            f"{slot_bytes} (pool.slot_memory_gib): {base_bytes} of weights and moments, {gradient_bytes} of "
            f"gradient{frozen}, and the activations of a forward (trainer.tokens_per_forward) come on top. It needs "
            f"{ranks_too}a smaller model"
        )
        self.policy = policy
        self.base_bytes = base_bytes
        self.gradient_bytes = gradient_bytes
        self.frozen_bytes = frozen_bytes
        self.ranks = ranks
        self.slot_bytes = slot_bytes


class FetchNotStopped(FlexmarlError):
    """A policy's state was being fetched from a slot that was lost, and the fetch did not end after it was stopped."""

    def __init__(self, policy: str, timeout_s: float) -> None:
        super().__init__(
            f"the fetch of a state of policy {policy} was stopped, as its slot was lost, and still writes to the "
            f"host's memory after {timeout_s:g} s; the policy can't be loaded beside it. Resume the run"
        )
        self.policy = policy
        self.timeout_s = timeout_s


class UnequalSlots(FlexmarlError):
    """The slot workers of a training pool have different versions of PyTorch. ``versions``: by slot."""

    def __init__(self, versions: Mapping[str, str]) -> None:
        listed = ", ".join(f"{slot} has {version}" for slot, version in versions.items())
        super().__init__(
            f"the slots of a pool need one version of torch: {listed}. Install one version, and resume the run"
        )
        self.versions = dict(versions)


class StoreError(FlexmarlError):
    """A write or a lease that a table refuses; the table is unchanged."""


class TooFewRows(StoreError):
    """A lease of more rows than are READY."""


class SamplesUnreachable(StoreError):
    """The bytes of samples can't be fetched from the host of their writer."""


class SamplesLost(StoreError):
    """Samples were lost with the host of their writer after others of their groups were trained."""


class WriterRetired(StoreError):
    """The store accepts nothing more from a writer: its process was given up for lost."""

    def __init__(self, writer: str) -> None:
        super().__init__(f"writer {writer} is retired: it was given up for lost, and its work is done again")
        self.writer = writer


class QueriesRefused(FlexmarlError):
    """Queries that were submitted to a run are not rolled out."""


class WorkerReplaced(FlexmarlError):
    """A message was meant for an earlier life of a rollout worker."""

    def __init__(self, writer: str, meant: str) -> None:
        super().__init__(f"this is {writer}, not {meant}, which has ended")
        self.writer = writer
        self.meant = meant


class StoreFull(StoreError):
    """There is no room for a write: it was refused whole, and nothing else is lost. The same write may succeed after
    rows were consumed, or when the disk has room again."""

    ERRNOS: ClassVar = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
    """Error numbers of an OSError with this meaning."""

    def __init__(
        self, where: Path, needed_bytes: int, problem: str, *, by_its_own_limits: bool = False
    ) -> None:
        """``by_its_own_limits``: the disk has room, but the store is at its limits."""
        super().__init__(f"no room for {needed_bytes} bytes in {where}: {problem}")
        self.by_its_own_limits = by_its_own_limits
        self.where = where
        self.needed_bytes = needed_bytes
        self.problem = problem


class SelectTimeout(StoreError):
    """An expression of a client took longer than the store allows."""

    def __init__(self, where: str, timeout_s: float) -> None:
        super().__init__(
            f"the expression {where!r} took longer than {timeout_s:g} s, the most that the store spends on one: "
            "narrow it"
        )
        self.where = where
        self.timeout_s = timeout_s


class TooManySelects(StoreError):
    """The store evaluates as many expressions as it may, and as many as it may wait."""

    def __init__(self, running: int, waiting: int) -> None:
        super().__init__(
            f"the store evaluates {running} expressions and {waiting} wait for that, the most that may wait: try again "
            "later"
        )
        self.running = running
        self.waiting = waiting


class StaleSample(FlexmarlError):
    """A sample reached the trainer of a policy whose version did not generate it."""

    def __init__(self, sample_id: str, sample_version: int, policy: str, policy_version: int) -> None:
        super().__init__(
            f"sample {sample_id} was generated by version {sample_version} of policy {policy}, "
            f"which is at version {policy_version}: it can't be trained on strictly on-policy"
        )
        self.sample_id = sample_id
        self.sample_version = sample_version
        self.policy = policy
        self.policy_version = policy_version


class NonFiniteGradient(FlexmarlError):
    """The gradient of an optimizer step is infinite or not a number. The weights were not touched."""

    def __init__(self, policy: str, policy_version: int, grad_norm: float) -> None:
        super().__init__(
            f"policy {policy}, step from version {policy_version}: the gradient norm is {grad_norm}; "
            "the weights are unchanged; resume from the last checkpoint"
        )
        self.policy = policy
        self.policy_version = policy_version
        self.grad_norm = grad_norm


class CheckpointIncomplete(FlexmarlError):
    """A file of a checkpoint is missing, damaged, a link, or not one of those that were written."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"checkpoint file {path}: {problem}")
        self.path = path
        self.problem = problem


class CheckpointMismatch(FlexmarlError):
    """A checkpoint is whole but belongs to something else: a tensor, name or number differs."""

    def __init__(self, path: Path, name: str, expected: str, actual: str) -> None:
        super().__init__(f"checkpoint file {path}: {name}: expected {expected}, found {actual}")
        self.path = path
        self.name = name
        self.expected = expected
        self.actual = actual


class WrongVersion(FlexmarlError):
    """A turn asked for another version of the policy than the one that is served."""

    def __init__(self, policy: str, requested: int, served: int | None) -> None:
        super().__init__(f"a turn asks for version {requested} of {policy}, version {served} is served")
        self.policy = policy
        self.requested = requested
        self.served = served


class WrongPolicy(FlexmarlError):
    """An instance was asked for a policy that it does not serve, or given weights of one that it has no model for."""

    def __init__(self, policy: str, requested: str) -> None:
        super().__init__(f"an instance of policy {policy} was asked for policy {requested}")
        self.policy = policy
        self.requested = requested


class NoInstance(FlexmarlError):
    """A policy has no instance, and none has come back in time: its turns would wait for ever."""

    def __init__(self, policy: str, seconds: float, last_loss: str) -> None:
        since = f" for {seconds:g} s (router.return_timeout_s)" if seconds else ""
        super().__init__(f"policy {policy} has had no instance{since}; the last loss: {last_loss}")
        self.policy = policy
        self.seconds = seconds
        self.last_loss = last_loss


class LoadFailed(FlexmarlError):
    """An instance could not load a version. It serves nothing until a later load succeeds."""

    def __init__(self, policy: str, version: int, problem: str) -> None:
        super().__init__(f"version {version} of policy {policy} could not be loaded: {problem}")
        self.policy = policy
        self.version = version
        self.problem = problem


class ReadFailed(LoadFailed):
    """An instance could not read a version: a link is cut, its owner has left, or newer versions have replaced it. A
    later load, of this version or of a newer one, may succeed."""


class EngineFailed(FlexmarlError):
    """An engine is broken: it generates nothing any more, and its instance ends."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the engine has failed: {problem}")
        self.problem = problem


class EngineUnavailable(FlexmarlError):
    """The library of an engine is missing here, or is of a version or for a device that can't be used."""

    def __init__(self, engine: str, problem: str) -> None:
        super().__init__(f"the engine {engine} can't be used: {problem}")
        self.engine = engine
        self.problem = problem


class NoDeviceMemory(FlexmarlError):
    """A device has too little free memory for an engine."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


class EndpointFailed(FlexmarlError):
    """An endpoint does not answer, or refuses a request: the turn fails. Its instance continues."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"the endpoint {url}: {problem}")
        self.url = url
        self.problem = problem


class PromptTooLong(FlexmarlError):
    """The prompt and the new tokens of a request exceed the engine's context, or its memory for keys and values.

    ``limited_by``: the setting that allows only ``max_context`` tokens.
    """

    def __init__(
        self,
        request_id: str,
        prompt_tokens: int,
        max_new_tokens: int,
        max_context: int,
        limited_by: str = "max_context",
    ) -> None:
        limit = "context" if limited_by == "max_context" else "memory for keys and values"
        super().__init__(
            f"request {request_id}: {prompt_tokens} prompt tokens + {max_new_tokens} new ones exceed the "
            f"engine's {limit} of {max_context} tokens: shorten the prompt or raise engine.{limited_by}"
        )
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.max_context = max_context
        self.limited_by = limited_by


class InvalidRequest(FlexmarlError):
    """A request that no engine can serve: an empty prompt, a token outside the vocabulary, an id in use."""

    def __init__(self, request_id: str, problem: str) -> None:
        super().__init__(f"request {request_id}: {problem}")
        self.request_id = request_id
        self.problem = problem


class TurnsRewritten(InvalidRequest):
    """The chat template rewrites earlier turns of a conversation: their tokens can't be continued."""


class RequestsInFlight(FlexmarlError):
    """The engine's weights were replaced while requests were pending: they would mix two versions."""

    def __init__(self, pending: int) -> None:
        super().__init__(f"weights were replaced with {pending} requests in flight: drain or abort first")
        self.pending = pending


class UnsupportedModel(FlexmarlError):
    """The embedded engine can't run this architecture; another engine may."""

    def __init__(self, model: str, problem: str) -> None:
        super().__init__(f"{model}: {problem}")
        self.model = model
        self.problem = problem


class NonFiniteLogits(FlexmarlError):
    """The model's output is infinite or not a number: its weights are broken, or were never loaded."""

    def __init__(self, request_ids: tuple[str, ...]) -> None:
        super().__init__(
            f"the logits of {len(request_ids)} requests ({', '.join(request_ids[:4])} ...) are not finite: "
            "check the weights that were loaded last"
        )
        self.request_ids = request_ids
