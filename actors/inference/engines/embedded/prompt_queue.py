"""The waiting requests, and the choice of those whose prompts are computed next. Pure."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..engine import EngineRequest
from .key_value_memory import REUSE_TOKENS
from .prefix_tree import Prefix
from .prompt_batch import PromptPart
from .slot_cache import round_up

# With small models a prefill costs about as much as a decode step. So new requests wait until they are this share of
# the running rows, but at most this number of steps.
ADMIT_SHARE = 1 / 8
ADMIT_STEPS = 8
# Long prompts that shorter ones may pass at once: it bounds the work per step.
MOST_PASSED = 16


@dataclass(slots=True)
class Room:
    """The room for further sequences beside ``rows`` running ones.

    All rows of the cache are as long as the longest sequence will be at its end, ``columns``: a sequence that was
    admitted never has to give its memory back. ``tokens``: of the whole cache.
    """

    rows: int
    columns: int
    max_rows: int
    tokens: int

    def take(self, columns: int) -> bool:
        """Admits a sequence of at most ``columns`` tokens. Returns False if it does not fit now."""
        longest = max(self.columns, round_up(columns))
        if self.rows == self.max_rows or (self.rows + 1) * longest > self.tokens:
            return False
        self.rows, self.columns = self.rows + 1, longest
        return True


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that leaves the queue. ``prefix``: the beginning of its prompt whose keys and values are known."""

    request: EngineRequest
    prefix: Prefix

    @property
    def rest(self) -> PromptPart:
        """The part of the prompt that is to be computed."""
        return PromptPart(self.request.prompt_tokens[self.prefix.tokens :], self.prefix.tokens)


class PromptQueue:
    """First come, first served; but while a long prompt is computed in chunks, shorter ones pass the next long one.

    ``chunk``: at most this many tokens are computed together, with padding, without repetitions. ``match``: the known
    beginning of a prompt; None if nothing is kept.
    """

    def __init__(self, chunk: int, match: Callable[[tuple[int, ...]], Prefix] | None) -> None:
        self._chunk = chunk
        self._match = match
        self._waiting: deque[EngineRequest] = deque()
        self._held_steps = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: EngineRequest) -> None:
        """Appends a request; its id must not be that of another one that waits."""
        self._waiting.append(request)

    def put_back(self, group: list[Admitted]) -> None:
        """Puts a group that ``take`` has returned to the front again, in its order: its forward has failed."""
        self._waiting.extendleft(admitted.request for admitted in reversed(group))

    def remove(self, request_id: str) -> bool:
        """Removes a request. Returns False if it does not wait here."""
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return True
        return False

    def is_due(self, running: int, max_rows: int) -> bool:
        """To be called once per step: True if requests should be admitted now, beside ``running`` ones."""
        ready = min(len(self._waiting), max_rows - running)
        self._held_steps += ready > 0
        if ready == 0 or (ready < ADMIT_SHARE * running and self._held_steps < ADMIT_STEPS):
            return False
        self._held_steps = 0
        return True

    def take(self, room: Room, is_long_allowed: bool) -> list[Admitted]:
        """The next requests: some whose prompts are computed together, or one that is longer than a chunk."""
        group: list[Admitted] = []
        batch = _Batch(self._chunk, self._match is not None)
        passed: list[EngineRequest] = []
        while self._waiting and len(passed) <= MOST_PASSED:
            request = self._waiting[0]
            admitted = Admitted(request, self._match(request.prompt_tokens) if self._match else Prefix())
            is_long = self.is_long(admitted)
            if is_long and not is_long_allowed:
                passed.append(self._waiting.popleft())
                continue
            if (is_long and group) or not (is_long or batch.fits(admitted)):
                break
            if not room.take(len(request.prompt_tokens) + request.max_new_tokens):
                break
            group.append(admitted)
            self._waiting.popleft()
            if is_long:
                break
        self._waiting.extendleft(reversed(passed))
        return group

    def is_long(self, admitted: Admitted) -> bool:
        """True if the rest of the prompt is computed in several chunks."""
        return len(admitted.request.prompt_tokens) - admitted.prefix.tokens > self._chunk


class _Batch:
    """The prompts of one forward: at most ``chunk`` tokens with padding, equal prompts once."""

    def __init__(self, chunk: int, is_kept: bool) -> None:
        self._chunk = chunk
        self._is_kept = is_kept
        self._prompts: set[tuple[int, ...]] = set()
        self._beginnings: set[tuple[int, ...]] = set()
        self._longest = 0

    def fits(self, admitted: Admitted) -> bool:
        """Adds a prompt. Returns False if it has to wait for the next forward: it is too long, or begins like another
        one, so that a part of it is known then."""
        prompt, prefix_length = admitted.request.prompt_tokens, admitted.prefix.tokens
        beginning = prompt[: prefix_length + REUSE_TOKENS]
        if prompt not in self._prompts:
            longest = max(self._longest, len(prompt) - prefix_length)
            if self._prompts and longest * (len(self._prompts) + 1) > self._chunk:
                return False
            if self._is_kept and len(prompt) > len(beginning) and beginning in self._beginnings:
                return False
            self._longest = longest
            self._prompts.add(prompt)
            self._beginnings.add(beginning)
        return True
