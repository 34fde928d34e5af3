"""The request of a turn that a workflow asks for. Pure."""

import json
from collections.abc import Iterable, Mapping

import xxhash

from ...core.base.texts import half_problem, holds_half
from ..errors import InvalidRequest, RecipeError
from ..messages import Chat, Constraint, GenerateRequest
from ..names import AgentName
from ..workflow import Prompt, Turn
from .prompts import Segments, prompt_parts, segments_and_chat
from .rollout_setup import RolloutSetup
from .trajectory import Trajectory
from .turn_options import NO_OPTIONS, TurnOptions, turn_sampling


def turn_request(
    setup: RolloutSetup,
    agent: AgentName,
    trajectory: Trajectory,
    prompt: Prompt,
    options: TurnOptions,
    tokens_left: int | None = None,
) -> GenerateRequest:
    """``tokens_left``: the most new tokens that the trajectory's limits allow.

    Raises InvalidRequest for a prompt or an option that is invalid, and RecipeError for a turn in the prompt whose
    tokens are of another tokenizer."""
    settings, sample_id = setup.agents[agent], trajectory.next_sample_id()
    policy = settings.generator(exploring=trajectory.is_exploration)
    segments: Segments
    chat: Chat | None
    try:
        if isinstance(prompt, str) and options is NO_OPTIONS:  # as most are
            segments, chat = (prompt,), None
            if holds_half(prompt):
                raise ValueError(half_problem({"prompt": prompt}))
        else:
            segments, chat = _prompt(setup, agent, prompt, options)
            _refuse_halves(segments, chat, options)
        constraint = None if options is NO_OPTIONS else _constraint(chat, options)
        sampling = turn_sampling(settings.sampling, options, trajectory.temperature, trajectory.is_evaluation)
    except ValueError as problem:
        raise InvalidRequest(sample_id, f"agent {agent}: {problem}") from None
    seed = sampling.seed
    if seed is None:
        seed = xxhash.xxh3_64_intdigest(f"{setup.recipe.seed} {sample_id}".encode())
    return GenerateRequest(
        sample_id,
        policy,
        segments,
        trajectory.versions[policy],
        seed,
        sampling.temperature,
        sampling.max_new_tokens if tokens_left is None else min(sampling.max_new_tokens, tokens_left),
        (),
        sampling.truncation,
        sampling.stop,
        chat,
        constraint,
    )


def _constraint(chat: Chat | None, options: TurnOptions) -> Constraint | None:
    """None if the answer may have any form. Raises ValueError."""
    schema, must_call = options.schema, options.must_call
    if schema is None and not must_call:
        return None
    if schema is not None and not isinstance(schema, Mapping):
        raise ValueError(f"schema is {type(schema).__name__}, needs a JSON schema, which is an object")
    names = tuple(tool["function"]["name"] for tool in (chat.tools if chat is not None else ()))
    if isinstance(must_call, str):
        if must_call not in names:
            raise ValueError(f"must_call is {must_call!r}, the tools are: {', '.join(names) or 'none'}")
        names = (must_call,)
    if must_call:
        if not names:
            raise ValueError("must_call needs tools: there is none to call")
        return Constraint(tools=names)
    try:
        return Constraint(json.dumps(schema), names)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"schema is not JSON: {error}") from None


def _prompt(
    setup: RolloutSetup, agent: AgentName, prompt: Prompt, options: TurnOptions
) -> tuple[Segments, Chat | None]:
    parts = prompt_parts(prompt)
    _refuse_other_tokens(setup, agent, parts)
    return segments_and_chat(parts, options)


def _refuse_halves(segments: Segments, chat: Chat | None, options: TurnOptions) -> None:
    """Raises ValueError for a text that no message can carry: a tokenizer could not read it either."""
    texts: dict[str, object] = {"prompt": [part for part in segments if isinstance(part, str)]}
    if chat is not None:
        texts |= {"messages": chat.messages, "tools": chat.tools}
    if problem := half_problem({**texts, "stop": options.stop, "schema": options.schema}):
        raise ValueError(problem)


def _refuse_other_tokens(setup: RolloutSetup, agent: AgentName, parts: Iterable[object]) -> None:
    for part in parts:
        if isinstance(part, Turn) and _tokenizer(setup, AgentName(part.agent)) != _tokenizer(setup, agent):
            raise RecipeError(
                f"the workflow puts a turn of {part.agent!r} into a prompt of {agent!r}, whose tokenizer is "
                "another: its tokens would mean something else; put the turn's .text there"
            )


def _tokenizer(setup: RolloutSetup, agent: AgentName) -> str:
    return setup.policies[setup.agents[agent].policy].tokenizer
