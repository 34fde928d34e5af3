"""The user's side: the interface of a workflow."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Final, Literal, Protocol, Self

from ..core.base.texts import holds_half
from .chat.answer import Answer, parse_answer
from .environments.tool_calls import ToolCall, ToolOrSchema
from .errors import InvalidReward, RecipeError
from .messages import Query
from .recipe.missing_await import await_hint

__all__ = [
    "Agent",
    "Agents",
    "Message",
    "OnText",
    "Prompt",
    "Query",
    "Rewards",
    "ToolCall",
    "Turn",
]


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation by ``agent``, as text and as its exact tokens. ``prompt_tokens``: all tokens before them.

    ``logprobs[i]`` is of ``tokens[i]``, under the distribution that it was drawn from. ``finish_reason``: ``length`` at
    the turn's ``max_new_tokens``, ``stop`` at the end of the answer or a stop string. ``version``: of the policy, when
    it generated the first token. ``conversation``: the messages of the prompt and ``message`` as the last one; empty if
    the prompt was text. ``tools``: schemas of the tools that the agent was shown. ``answer``: the parts of the text, as
    the instance has read them from the tokens; None if they are those of a text in the form that most models write.

    ``sample_id`` names its row in the store, for external writers of columns. ``writer`` takes the arguments of
    ``write``; a test that makes a turn by hand may pass a dictionary's ``update``.
    """

    agent: str
    text: str
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    sample_id: str = ""
    writer: Callable[[dict[str, Any]], None] | None = field(default=None, repr=False, compare=False)
    logprobs: tuple[float, ...] = field(default=(), repr=False)
    finish_reason: Literal["stop", "length"] = "stop"
    version: int = 0
    conversation: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    tools: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    answer: Answer | None = field(default=None, repr=False)

    @property
    def parts(self) -> Answer:
        """The content, the reasoning and the calls of the text."""
        return parse_answer(self.text) if self.answer is None else self.answer

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message: ``role``, ``content`` without reasoning and calls, and if there are some
        ``reasoning_content`` and ``tool_calls``, as OpenAI's API has them. A call that can't be read is in the content,
        as it was written."""
        return self.parts.message

    @property
    def reasoning(self) -> str:
        """The text that the model has thought before its answer, or an empty text."""
        return self.parts.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls in the text, in order; those that can't be made have an ``error``."""
        return self.parts.tool_calls([tool["function"]["name"] for tool in self.tools])

    def write(self, **columns: Any) -> None:
        """Fills columns of the turn's sample that the config declares (``agents.<agent>.columns``), each once, before
        the workflow returns: ``turn.write(difficulty=0.3, plan=[1, 2])``. All of them or none.

        Raises RecipeError, which ends the run, if a column is not declared or has an external writer, or the workflow
        has returned; InvalidColumn, which fails the trajectory, for a value of a wrong type and for a second value.
        """
        if self.writer is None:
            raise RecipeError(
                f"a turn of {self.agent!r} that was not generated has no columns: give it a writer"
            )
        self.writer(columns)


LARGEST_REWARD: Final = 1e12
"""The norm of a gradient squares advantages, which without scaling are as large as rewards, in float32."""

Message = Mapping[str, Any]
"""A message of a conversation, as chat templates take them: ``role``, ``content``, and perhaps ``name``,
``tool_calls``, ``tool_call_id``."""

Prompt = str | Turn | Sequence[str | Turn | Message]
OnText = Callable[[str], None]


class Agent(Protocol):
    """An agent as a workflow uses it; one object for each trajectory."""

    async def generate(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[ToolOrSchema] = (),
        stop: str | Sequence[str] | None = None,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        schema: Mapping[str, Any] | None = None,
        must_call: bool | str = False,
        retokenize: bool = False,
        on_text: OnText | None = None,
    ) -> Turn:
        """One turn of this agent. In a prompt of several parts a ``Turn`` stands for its prompt and its answer,
        token by token: a conversation continues as ``[turn, "next question"]`` and is never tokenised again. A turn
        of an agent with another tokenizer is refused (RecipeError): pass its ``text``.

        A list of messages goes through the tokenizer's chat template. ``[turn, {"role": "user", ...}]`` continues the
        turn's conversation: its prompt and its answer stay the same tokens, and only the new text of the template is
        tokenised. ``retokenize``: earlier turns are text instead, and all of the prompt is tokenised again; for
        templates that rewrite them. ``tools``: async functions, or schemas, that the template shows to the
        model, see ``Turn.tool_calls``.

        The others precede the agent's ``sampling`` for this turn; ``max_new_tokens`` may only be smaller. ``stop``: the
        turn ends with the token that completes one of these strings, which its text and tokens include. ``seed``: the
        same one gives the same turn for the same prompt, version and engine.

        ``schema``: the answer is JSON of this JSON schema, or a call of one of the tools. ``must_call``: the answer is
        one call of one of the tools, or of this one. The engine draws such an answer from other distributions than the
        trainer's, so the turn is not trained, and needs no reward.

        ``on_text`` is called with the turn's text so far whenever there is more of it, and at last with all of it. The
        generation does not wait for it; it must not block. An error that it raises ends the turn, and is raised here.
        If an instance is lost, the turn begins again, and with it the text.

        Raises PromptTooLong if the prompt and the new tokens do not fit the engine's context, InvalidRequest, which
        names agent, turn and argument, if one is invalid or the chat template can't be used, NonFiniteLogits if the
        model's output is infinite or not a number, and CallTimeout after the turn's deadline."""


Agents = Mapping[str, Agent]


class Rewards:
    """The result of a trajectory: rewards of agents, of single turns and of the team, and metrics of the recipe's own.

    ``Rewards(solver=1.0, critic=0.5, metrics={"accuracy": 1.0}).of(draft, 0.3).of_team(1.0)``

    A sample, which is one turn, is trained with its agent's reward, plus the team's, plus its own; see
    ``agents.<agent>.algorithm.rewards``. An agent that generated a turn that is not left out needs at least one of
    them.
    """

    def __init__(self, /, *, metrics: Mapping[str, float] | None = None, **by_agent: float) -> None:
        """Raises InvalidReward for a value that is not a finite number."""
        self.by_agent = by_agent
        self.metrics = dict(metrics or {})
        # Here, not only when the workflow has returned: so the traceback names the line that gives the value.
        for agent, value in by_agent.items():
            _finite(f"reward of {agent!r}", value)
        for name, value in self.metrics.items():
            _finite(f"metric {name!r}", value)
        self.turns: list[tuple[Turn, float]] = []
        """The arguments of each ``of``."""
        self.left_out: list[Turn] = []
        """The arguments of each ``leave_out``."""
        self.team: float | None = None
        self._returned = False

    def of(self, turn: Turn, reward: float) -> Self:
        """Gives one turn a reward of its own; several of one turn add up. Returns this object, for further calls.

        A turn of another trajectory or one that was made by hand fails the trajectory when the workflow returns
        (InvalidReward). Raises InvalidReward after that, and for a reward that is not a finite number.
        """
        if not isinstance(turn, Turn):
            raise InvalidReward(
                f"Rewards.of wants a Turn that generate has returned, not {turn!r:.120}{await_hint(turn)}"
            )
        self._check_open(f"of turn {turn.sample_id} of agent {turn.agent!r}")
        _finite(f"reward of turn {turn.sample_id} of {turn.agent!r}", reward)
        self.turns.append((turn, reward))
        return self

    def of_team(self, reward: float) -> Self:
        """Gives a reward to every agent that generated a turn or has a reward of its own; several add up. Returns this
        object. Raises InvalidReward after the workflow has returned, and for an infinite or missing number."""
        self._check_open("of the team")
        self.team = _finite("reward of the team", reward) + (self.team or 0.0)
        return self

    def leave_out(self, turn: Turn) -> Self:
        """Leaves a turn out of the samples: it is not trained, needs no reward, and is counted. Returns this object.
        Raises InvalidReward after the workflow has returned; a turn of another trajectory fails this one."""
        if not isinstance(turn, Turn):
            raise InvalidReward(
                f"Rewards.leave_out wants a Turn that generate has returned, not {turn!r:.120}{await_hint(turn)}"
            )
        self._check_open(f"of turn {turn.sample_id} of agent {turn.agent!r}")
        self.left_out.append(turn)
        return self

    def checked(self) -> "Rewards":
        """The same as plain floats, with one entry in ``turns`` for each turn. Raises InvalidReward for a value that is
        not a finite number, for a reward beyond ``LARGEST_REWARD``, and for a metric's name that can't be sent."""
        rewards = Rewards(
            metrics={_name(name): _finite(f"metric {name!r}", value) for name, value in self.metrics.items()},
            **{name: _reward(f"reward of {name!r}", value) for name, value in self.by_agent.items()},
        )
        if self.team is not None:
            rewards.team = _reward("reward of the team", self.team)
        rewards.turns = _sum_by_turn(self.turns)
        rewards.left_out = self.left_out
        return rewards

    def close(self) -> None:
        """Refuses further rewards: the workflow has returned."""
        self._returned = True

    def _check_open(self, which: str) -> None:
        if self._returned:
            raise InvalidReward(f"reward {which}: the workflow has returned, and its rewards are taken")


def _sum_by_turn(turns: Sequence[tuple[Turn, float]]) -> list[tuple[Turn, float]]:
    """``turns`` with one entry for each turn."""
    sums: dict[object, tuple[Turn, float]] = {}
    for turn, value in turns:
        name = f"reward of turn {turn.sample_id} of {turn.agent!r}"
        key = turn.sample_id or id(turn)
        before = sums[key][1] if key in sums else 0.0
        sums[key] = (turn, _reward(name, before + _finite(name, value)))
    return [*sums.values()]


def _name(metric: object) -> str:
    if not isinstance(metric, str) or holds_half(metric):
        raise InvalidReward(f"metric {metric!r}: a name is a string without halves of surrogate pairs")
    return metric


def _reward(what: str, value: object) -> float:
    number = _finite(what, value)
    if abs(number) > LARGEST_REWARD:
        raise InvalidReward(
            f"{what} is {number:g}: beyond {LARGEST_REWARD:g} the gradient overflows; divide it"
        )
    return number


def _finite(what: str, value: object) -> float:
    try:
        if isinstance(value, Real) and math.isfinite(value):
            return float(value)
    except OverflowError:
        raise InvalidReward(f"{what} is an integer beyond every float: it must be a finite number") from None
    raise InvalidReward(f"{what} is {value!r}: it must be a finite number{await_hint(value)}")


Workflow = Callable[[Query, Agents], Awaitable[Rewards]]
