"""A session: the model calls of one program, within one trajectory.

    request ─> agent by the model's name ─> the turn that it continues ─> generate ─> the answer, and its turn

A call whose program has gone is cancelled, and its turn is not of the trajectory: no program has read it. All calls end
with the session.
"""

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import structlog

from ...core.base.task_groups import first_error
from ...core.errors import CallTimeout
from ..errors import InvalidRequest, LimitReached, PromptTooLong
from ..workflow import Agent, Turn
from .answer import Answer, answer_of
from .conversations import Conversations, Place
from .model_call import ApiError, Message, ModelCall

OnChoiceText = Callable[[int, str], None]
"""Called with the number of a choice, and its text so far."""

MOST_OPEN_CALLS: Final = 64
"""At once. A program that asks for more has lost its way."""

_log = structlog.get_logger()


class Session:
    """``agents``: by their names. ``models``: further names of them, as the program gives them. ``error``: the first
    that no request has caused: the trajectory can't succeed."""

    def __init__(self, agents: Mapping[str, Agent], models: Mapping[str, str]) -> None:
        self.id = secrets.token_urlsafe(9)
        self.key = f"fm-{secrets.token_urlsafe(24)}"
        self.models = {**{agent: agent for agent in agents}, **models}
        self.turns: list[Turn] = []
        """Those that have ended, in the order of their ends."""
        self.counts: Counter[str] = Counter()
        """The numbers of turns by ``Kind``."""
        self.error: Exception | None = None
        self._agents = agents
        self._conversations = Conversations()
        self._numbers = itertools.count()
        self._calls: set[asyncio.Task[list[Answer]]] = set()
        self._closed = False
        self._has_logged = False

    async def answer(self, call: ModelCall, on_text: OnChoiceText | None = None) -> list[Answer]:
        """The choices of an answer. Raises ApiError."""
        if self._closed:
            raise ApiError(410, f"the session {self.id} has ended", code="session_ended")
        if len(self._calls) >= MOST_OPEN_CALLS:
            raise ApiError(
                429, f"{MOST_OPEN_CALLS} calls of this session are under way", code="too_many_calls"
            )
        task = asyncio.create_task(self._answer(call, on_text), name=f"call of session {self.id}")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by ``close``
                raise ApiError(410, f"the session {self.id} has ended", code="session_ended") from None
            task.cancel()
            raise

    async def close(self) -> None:
        """Ends all calls."""
        self._closed = True
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _answer(self, call: ModelCall, on_text: OnChoiceText | None) -> list[Answer]:
        agent = self.agent_of(call.model)
        place = self._conversations.place(agent, call.messages, call.tools)
        self._log_difference(agent, place)
        try:
            with _refusals(), first_error():
                async with asyncio.TaskGroup() as tasks:
                    choices = [
                        tasks.create_task(self._generate(agent, place, call, number, on_text))
                        for number in range(call.choices)
                    ]
            return [self._keep(agent, call, choice.result()) for choice in choices]
        except ApiError:
            raise
        except Exception as error:  # the workflow raises it: a program can't be asked what it is
            self.error = self.error or error
            raise ApiError(500, f"{type(error).__name__}: {error}", code="engine_error") from error

    async def _generate(
        self, agent: str, place: Place, call: ModelCall, number: int, on_text: OnChoiceText | None
    ) -> Turn:
        parts: tuple[Turn | Message, ...] = place.messages
        if place.turn is not None:
            parts = (place.turn, *place.messages)
        listener = None if on_text is None else lambda text: on_text(number, text)
        return await self._agents[agent].generate(parts, tools=call.tools, on_text=listener, **call.options)

    def _keep(self, agent: str, call: ModelCall, turn: Turn) -> Answer:
        answer = answer_of(turn, f"{self.id}{next(self._numbers)}")
        kind = self._conversations.add(agent, call.messages, call.tools, answer.message(), turn)
        self.counts[kind] += 1
        self.turns.append(turn)
        return answer

    def agent_of(self, model: str) -> str:
        """The agent that ``model`` names. Raises ApiError."""
        if (agent := self.models.get(model)) is None:
            raise ApiError(
                404,
                f"there is no model {model!r}; there is: {', '.join(self.models)}",
                code="model_not_found",
                parameter="model",
            )
        return agent

    def _log_difference(self, agent: str, place: Place) -> None:
        if place.difference and not self._has_logged:
            self._has_logged = True
            _log.info("a program has rewritten its conversation", agent=agent, difference=place.difference)


@contextmanager
def _refusals() -> Iterator[None]:
    """Raises an ApiError in the place of each error that the request has caused, or the trajectory's limits."""
    try:
        yield
    except PromptTooLong as error:
        raise ApiError(400, str(error), code="context_length_exceeded", parameter="messages") from error
    except InvalidRequest as error:
        raise ApiError(400, error.problem) from error
    except LimitReached as error:
        raise ApiError(400, str(error), code="limit_reached") from error
    except CallTimeout as error:
        raise ApiError(504, str(error), code="turn_timeout") from error
