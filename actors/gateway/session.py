"""A session: the model calls of one program, within one trajectory.

    request ─> agent by the model's name ─> the turn that it continues ─> generate ─> the answer, and its turn

An option that no agent may have is changed, not refused: programs have them in their code. A chat template that
rewrites earlier turns makes the turn begin again from its messages, as a branch.

A call whose program has gone is cancelled, and its turn is not of the trajectory: no program has read it. All calls end
with the session.
"""

import asyncio
import itertools
import json
import math
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Literal, Protocol

import structlog

from ...core.base.task_groups import first_error
from ...core.errors import CallTimeout
from ..deadline import Deadline
from ..errors import InvalidRequest, LimitReached, PromptTooLong, TurnsRewritten
from ..workflow import Agent, Turn
from .answer import Answer, answer_of
from .call_rate import CallRate
from .conversations import Conversations, Place
from .model_call import ApiError, Message, ModelCall
from .trajectory_programs import TrajectoryPrograms

MOST_OPEN_CALLS: Final = 64
"""At once. A program that asks for more has lost its way."""

TrainRule = Literal["main", "all"] | Callable[[Turn], bool]
"""The turns of an agent that are trained: its longest conversation, all, or those for which the function is true."""

_log = structlog.get_logger()


class Listener(Protocol):
    """Listens to the choices of an answer."""

    def hear(self, choice: int, text: str) -> None:
        """Takes the text so far of a choice's turn."""
        ...

    def agreed(self, choice: int, answer: Answer) -> Answer:
        """The answer as the program gets it. Raises ApiError if the program has got another text already."""
        ...


class Session:
    """``agents``: by their names. ``models``: further names of them, as the program gives them. ``error``: the first
    that no request has caused: the trajectory can't succeed. ``refusal``: the last that a request got. ``programs``: of
    the trajectory; a session without one has its own."""

    def __init__(
        self,
        agents: Mapping[str, Agent],
        models: Mapping[str, str],
        programs: TrajectoryPrograms | None = None,
        name: str = "",
        rate: CallRate | None = None,
    ) -> None:
        """``name``: its id; empty: a random one. ``rate``: of its calls; None: it has no limit."""
        self.id = name or secrets.token_urlsafe(9)
        self.key = f"fm-{secrets.token_urlsafe(24)}"
        self.models = {**{agent: agent for agent in agents}, **models}
        self.turns: list[Turn] = []
        """Those that have ended, in the order of their ends."""
        self.turns_of_calls: defaultdict[str, list[Turn]] = defaultdict(list)
        """The same, by the id of the call: its choices."""
        self.counts: Counter[str] = Counter()
        """The numbers of turns by ``Kind``; of those that are ``retokenized``, and ``masked``: not trained; and of
        options that were changed, ``capped`` and ``warmed``."""
        self.earlier: dict[str, tuple[Message, ...]] = {}
        """The conversations that a request may name by the id of their last call."""
        self.error: Exception | None = None
        self.refusal = ""
        self.programs = programs or TrajectoryPrograms()
        self._agents = agents
        self._rate = rate
        self._conversations = Conversations()
        self._numbers = itertools.count()
        self._calls: set[asyncio.Task[list[Answer]]] = set()
        self._limits: list[Deadline] = []
        self._closed = False
        self._logged: set[str] = set()

    def admit(self) -> None:
        """Counts a request. Raises ApiError if they come too fast."""
        if self._rate is None:
            return
        delay_s = self._rate.take(asyncio.get_running_loop().time())
        if delay_s:
            limit = f"rollout.gateway.calls_per_s={self._rate.per_s:g}"
            problem = f"the session {self.id} makes more calls than {limit}"
            raise ApiError(429, problem, code="rate_limit_exceeded", retry_s=math.ceil(delay_s))

    async def answer(self, call: ModelCall, listener: Listener | None = None) -> list[Answer]:
        """The choices of an answer. Raises ApiError."""
        if self._closed:
            raise ApiError(410, f"the session {self.id} has ended", code="session_ended")
        if len(self._calls) >= MOST_OPEN_CALLS:
            raise ApiError(
                429, f"{MOST_OPEN_CALLS} calls of this session are under way", code="too_many_calls"
            )
        task = asyncio.create_task(self._answer(call, listener), name=f"call of session {self.id}")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            with self.keeping_refusal(), ExitStack() as pauses:
                for limit in self._limits:
                    pauses.enter_context(limit.paused())
                return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and not (caller and caller.cancelling()):  # by ``close``
                raise ApiError(410, f"the session {self.id} has ended", code="session_ended") from None
            task.cancel()
            raise

    @contextmanager
    def keeping_refusal(self) -> Iterator[None]:
        """Keeps the reason for which a request is refused: the program may not say it."""
        try:
            yield
        except ApiError as error:
            self.refusal = error.problem
            raise

    @contextmanager
    def limited(self, deadline: Deadline) -> Iterator[None]:
        """Stops the deadline's time while a call is under way: that is the trainer's, or that of other trajectories."""
        self._limits.append(deadline)
        try:
            yield
        finally:
            self._limits.remove(deadline)

    def untrained(self, rules: Mapping[str, TrainRule]) -> set[str]:
        """The ids of the turns that no rule trains. Agents without a rule are trained on all."""
        main = {turn.sample_id for agent in rules for turn in self._conversations.main_turns(agent)}

        def is_trained(turn: Turn) -> bool:
            rule = rules.get(turn.agent, "all")
            return rule == "all" or (turn.sample_id in main if rule == "main" else rule(turn))

        return {turn.sample_id for turn in self.turns if not is_trained(turn)}

    def leave_out(self, rules: Mapping[str, TrainRule]) -> None:
        """Marks the turns that no rule trains. To be called once, at the session's end."""
        untrained = self.untrained(rules)
        self.programs.left_out |= untrained
        self._count("masked", len(untrained))

    async def close(self) -> None:
        """Ends all calls."""
        self._closed = True
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _answer(self, call: ModelCall, listener: Listener | None) -> list[Answer]:
        agent = self.agent_of(call.model)
        place = self._conversations.place(agent, call.messages, call.tools, call.text)
        if place.difference:
            self._log_once("a program has rewritten its conversation", agent, place.difference)
        options = self._adapt(agent, call.options)
        try:
            with _refusals(), first_error():
                try:
                    turns = await self._generate(agent, place, call, options, listener)
                except TurnsRewritten as error:
                    self._log_once(
                        "a chat template rewrites turns: they are tokenised again", agent, error.problem
                    )
                    place = Place(None, call.messages)
                    turns = await self._generate(
                        agent, place, call, {**options, "retokenize": True}, listener
                    )
                    self._count("retokenized", len(turns))
            return [
                self._keep(agent, call, place, number, turn, listener) for number, turn in enumerate(turns)
            ]
        except ApiError:
            raise
        except Exception as error:  # the workflow raises it: a program can't be asked what it is
            self.error = self.error or error
            raise ApiError(500, f"{type(error).__name__}: {error}", code="engine_error") from error

    async def _generate(
        self,
        agent: str,
        place: Place,
        call: ModelCall,
        options: Mapping[str, Any],
        listener: Listener | None,
    ) -> list[Turn]:
        """One turn for each choice. Raises the error of the first that fails."""
        parts: tuple[str | Turn | Message, ...] = _with_objects(place.messages)
        if place.turn is not None:
            parts = (place.turn, *parts)

        async def generate(number: int) -> Turn:
            on_text = None if listener is None else lambda text: listener.hear(number, text)
            return await self._agents[agent].generate(parts, tools=call.tools, on_text=on_text, **options)

        if call.choices == 1:
            return [await generate(0)]
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                choices = [tasks.create_task(generate(number)) for number in range(call.choices)]
        return [choice.result() for choice in choices]

    def _keep(
        self, agent: str, call: ModelCall, place: Place, number: int, turn: Turn, listener: Listener | None
    ) -> Answer:
        answer = answer_of(turn, f"{self.id}{next(self._numbers)}", call)
        if listener is not None:
            try:
                answer = listener.agreed(number, answer)
            except ApiError:  # no program has read the turn
                self.programs.left_out.add(turn.sample_id)
                self._count("masked")
                raise
        message = answer.message()
        kind = self._conversations.add(
            agent, call.messages, call.tools, message, turn, call.text, begins_again=place.turn is None
        )
        if call.remembered is not None and number == 0:
            self.earlier[call.id] = (*call.remembered, message)
        self._count(kind)
        self.turns.append(turn)
        self.turns_of_calls[call.id].append(turn)
        return answer

    def _adapt(self, agent: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """``options`` as the agent may have them: without a temperature of 0 in training, and with no more new tokens
        than its own."""
        adapted = dict(options)
        if (sampling := self.programs.sampling.get(agent)) is None:
            return adapted
        most = adapted.get("max_new_tokens")
        if isinstance(most, int) and most > sampling.max_new_tokens:
            adapted["max_new_tokens"] = sampling.max_new_tokens
            self._count("capped")
        if sampling.is_training and adapted.get("temperature") == 0:
            del adapted["temperature"]
            self._count("warmed")
            self._log_once(
                "a program asks for temperature 0, from which nothing is learned: its turns have the agent's own",
                agent,
            )
        return adapted

    def _count(self, name: str, number: int = 1) -> None:
        self.counts[name] += number
        self.programs.counts[name] += number

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

    def _log_once(self, event: str, agent: str, difference: str = "") -> None:
        if event not in self._logged:
            self._logged.add(event)
            details = {"difference": difference} if difference else {}
            _log.info(event, agent=agent, **details)


def _with_objects(messages: Sequence[str | Message]) -> tuple[str | Message, ...]:
    """``messages`` with the arguments of calls as objects, as chat templates take them: the APIs have them as text."""
    return tuple(
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if isinstance(message, dict) and message.get("tool_calls")
        else message
        for message in messages
    )


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (TypeError, ValueError):  # the program's own error, which the model may see
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


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
