"""Messages between rollout and instances: one turn, and the versions that may generate it."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ...core.actor import endpoint
from ...core.ref import ActorRef
from ...transport.statistics import Chosen
from ..chat.answer import Answer
from ..errors import (
    EndpointFailed,
    EngineFailed,
    InvalidRequest,
    LoadFailed,
    NonFiniteLogits,
    PromptTooLong,
    ReadFailed,
    TurnsRewritten,
    WrongPolicy,
    WrongVersion,
)
from ..expert_routes import SentRoutes
from ..names import PolicyName, Version
from .constraint import Constraint
from .training import Published
from .truncation import Truncation


@dataclass(frozen=True, slots=True)
class VersionRange:
    """The policy versions that may generate a turn: ``oldest ... newest``, both included, or without an upper bound.

    A turn that new weights interrupt is resumed with them if they are in its range.
    """

    oldest: Version
    newest: Version | None

    @classmethod
    def exactly(cls, version: Version) -> "VersionRange":
        """The range of this one version."""
        return cls(version, version)

    def __contains__(self, version: object) -> bool:
        if not isinstance(version, int) or version < self.oldest:
            return False
        return self.newest is None or version <= self.newest


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt of messages, for the tokenizer's chat template. ``messages`` and ``tools``: as templates take them; each
    message has a role. An answer that was generated is a message as ``Answer.message`` has it: without the marks of its
    text.

    ``answered``: so many of the messages end with the answer of an earlier turn, whose prompt and answer, as tokens,
    are the two parts of the request's ``prompt``; 0 if all of them are text. Without messages that ``prompt`` is all of
    it, as for the rest of a turn that was interrupted.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    answered: int = 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One turn to generate. ``prompt`` is a sequence of segments: text, or token ids of earlier turns,
    which are never decoded and tokenised again. The instance must serve ``policy`` in one of ``versions``.

    If new weights interrupt the turn, the answer is the part generated so far. ``completion``: such a part, by earlier
    versions, that the generation continues; ``max_new_tokens`` counts its tokens too. ``stop``: strings that end the
    turn; the token that completes one is its last. ``chat``: if not None, the prompt is of messages.
    """

    sample_id: str
    policy: PolicyName
    prompt: tuple[str | tuple[int, ...], ...]
    versions: VersionRange
    seed: int
    temperature: float
    max_new_tokens: int
    completion: tuple[int, ...] = ()
    truncation: Truncation | None = None
    stop: tuple[str, ...] = ()
    chat: Chat | None = None
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to a GenerateRequest. ``tokens`` include the end-of-sequence token if one was drawn;
    ``logprobs[i]`` is the log-probability of ``tokens[i]`` under the distribution it was drawn from.

    ``text`` includes the request's ``completion``, ``tokens`` do not. ``interrupted``: new weights arrived; there may
    be no tokens yet. ``answer``: the parts of ``text`` if the prompt was of messages; None if the text is all of it.
    ``routes``: the experts of all tokens of prompt, completion and ``tokens`` but the last; None if the policy does not
    replay them, or nothing has recorded them.
    """

    text: str
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: Version
    finish_reason: Literal["stop", "length", "interrupted"]
    answer: Answer | None = None
    routes: SentRoutes | None = None


@dataclass(frozen=True, slots=True)
class WeightsMismatch:
    """An engine did not compute with the weights that it had loaded, and did so after it had loaded them again.

    ``difference``: the largest of a probe's log-probability from the trainer's. ``wrong``: the tensors that were wrong,
    in words.
    """

    difference: float
    bound: float
    wrong: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A version that an instance serves from now on, and the seconds that this took.

    ``pause_s``: from the last token of the interrupted turns until new ones may begin; the others are parts of it.
    ``transfer_s``: copying the bytes. ``load_s``: the engine's own work with them. ``chosen``: the path that they took.
    ``differences``: of the log-probability of each probe from the trainer's; empty if the version has no probe.
    ``mismatch``: the weights had to be loaded twice.
    """

    policy: PolicyName
    version: Version
    pause_s: float
    transfer_s: float
    load_s: float
    chosen: Chosen | None = None
    differences: tuple[float, ...] = ()
    mismatch: WeightsMismatch | None = None


class TextApi(Protocol):
    """A receiver of texts while they are generated."""

    async def take_text(self, stream: int, start: int, text: str) -> None:
        """A part of the text of ``stream``, from its character ``start`` on. A part may be lost."""


@dataclass(frozen=True, slots=True)
class TextTo:
    """The receiver of a turn's text as it comes. ``stream``: names the turn there, until its answer has arrived."""

    receiver: ActorRef[TextApi]
    stream: int


class InstanceApi(Protocol):
    @endpoint(raises=(WrongPolicy, WrongVersion, LoadFailed, ReadFailed, EngineFailed))
    async def load(self, published: Published) -> Loaded:
        """Fetches a version and serves it; returns once every new turn is generated by it. Running turns are
        interrupted: they are answered with the tokens generated so far.

        The policy may be another than the one served. One that is an adapter is served beside other adapters over the
        same base, whose turns continue; otherwise it takes the place of all others. Raises WrongPolicy if the instance
        has no model for it, and WrongVersion if the handle is of another version than ``published.version``: both
        change nothing. Raises LoadFailed, after which the policy is not served, ReadFailed if a later load may
        succeed, and EngineFailed, after which the instance ends.
        """

    @endpoint(raises=(EngineFailed,))
    async def served_version(self, policy: PolicyName) -> Version | None:
        """The version that generates new turns of the policy; None before the first is loaded, and while another policy
        is served in its place. Raises EngineFailed if the instance is about to end."""

    @endpoint(
        raises=(
            WrongPolicy,
            WrongVersion,
            PromptTooLong,
            InvalidRequest,
            TurnsRewritten,
            NonFiniteLogits,
            EndpointFailed,
            EngineFailed,
        )
    )
    async def generate(self, request: GenerateRequest, text_to: TextTo | None = None) -> Generation:
        """``text_to``: gets the text so far, ``completion`` included, in one-way messages; the last of it comes with
        the answer alone. Nothing waits for them.

        Raises WrongPolicy if another policy is served, WrongVersion if the version served is not in
        ``request.versions``, PromptTooLong, InvalidRequest, TurnsRewritten, NonFiniteLogits if a log-probability is
        infinite or not a number, EndpointFailed if the policy's endpoint gave no answer, and EngineFailed if the engine
        broke: the instance ends then."""
