"""The findings of a trial, from the ends of its trajectories. Pure.

The answers of a trial make no sense. So an error refuses the run only if no answer could have avoided it, and if each
of several trajectories has failed: a workflow may well fail at nonsense, of which a trained model writes little. Others
are warnings.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ....actors.environments.environment import Environment
from ....actors.errors import (
    InvalidEnvironment,
    InvalidRequest,
    InvalidReward,
    ProgramFailed,
    PromptTooLong,
    RecipeError,
)
from ....actors.recipe.recipe import Recipe
from ....actors.recipe.recipe_lines import line_of_error
from ....actors.rollout.groups.group_run import TrajectoryEnd
from ....core.base.texts import text_of
from ....core.errors import FlexmarlError
from ...config.run_config import RunConfig
from .trial_words import EMPTY_FOLDER, SWITCH, overrun_warning

_COROUTINE: Final = "'coroutine' object"
_OPTION: Final = "generate has no argument"
_TYPES: Final = frozenset(("type", "anyOf", "allOf", "oneOf", "$ref", "enum", "const"))
_AWAIT: Final = "write `await` before the call, as in `turn = await agent.generate(...)`"
_NOT_FINITE: Final = re.compile(r" is \S*\b(inf|nan)\b")
_CREATED: Final = re.compile(r'File "(.+)", line (\d+), in (\w+)')


@dataclass(slots=True)
class Trial:
    """``problems`` refuse the run, ``warnings`` do not."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def recipe_error_problem(recipe: Recipe, error: RecipeError) -> str:
    """The error would end the run at this trajectory."""
    return f"{_describe(recipe, error, text_of(error))} (a trajectory with random answers; {SWITCH})"


def judge_ends(config: RunConfig, recipe: Recipe, ends: Sequence[TrajectoryEnd], trial: Trial) -> None:
    """Adds to ``trial``. ``ends``: of trajectories that were played one after the other until one did not fail."""
    last, error = ends[-1], ends[0].error
    if last.failure is None:
        trial.warnings += [*_reward_warnings(config, last), *_tool_warnings(last)]
    elif last.trajectory.has_overrun:
        place = None if last.error is None else line_of_error(recipe.folder, last.error)
        trial.warnings.append(overrun_warning(config.checks.trajectory_timeout_s, place))
        return
    if error is None:
        return
    words = _describe(recipe, error, _words(config, error))
    if last.failure is not None and all(map(_is_certain, ends)):
        trial.problems.append(f"{words} ({_tries(ends)}; {SWITCH})")
    elif not any(_same_place(words, warning) for warning in trial.warnings):
        trial.warnings.append(f"{words} ({_tries(ends)}; those of the run may fail so too)")


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """Queries whose first prompt does not fit the context. ``end``: of the trajectory with the longest query.
    ``count``: their number, of those that were ``measured``."""

    end: TrajectoryEnd
    count: int
    measured: int


def has_long_prompt(end: TrajectoryEnd) -> bool:
    """True if the trajectory failed at a prompt that no answer comes before: with any answers it would."""
    return isinstance(_first(end.error), PromptTooLong) and end.failure is not None and _is_certain(end)


def judge_long_prompts(config: RunConfig, recipe: Recipe, long: LongPrompts, trial: Trial) -> None:
    """Adds to ``trial``: a problem if so many fail that they would end the run, else a warning."""
    assert long.end.error is not None, "its prompt has been refused"
    words = _describe(recipe, long.end.error, _words(config, long.end.error))
    kind = "evaluation" if long.end.trajectory.is_evaluation else "training"
    counted = f"{long.count} of the {long.measured} {kind} queries that were measured have such prompts"
    most = config.rollout.max_failed_share
    if long.count == long.measured or long.count > most * long.measured:
        trial.problems.append(
            f"{words} ({counted}, and rollout.max_failed_share={most:g} ends the run; {SWITCH})"
        )
    else:
        trial.warnings.append(f"{words} ({counted}: their trajectories fail, and train nothing)")


def _same_place(words: str, warning: str) -> bool:
    """True if training and evaluation fail at one line: once is enough."""
    return words.split(" ", 1)[0] == warning.split(" ", 1)[0]


def _tries(ends: Sequence[TrajectoryEnd]) -> str:
    failed = sum(end.failure is not None for end in ends)
    return f"{failed} of {len(ends)} trajectories with random answers"


def _is_certain(end: TrajectoryEnd) -> bool:
    """True for an error that no answer of a model avoids."""
    error = _first(end.error)
    if _COROUTINE in str(error) or _OPTION in str(error):
        return True
    has_answer = bool(end.trajectory.turns_to_reward())
    if isinstance(error, InvalidReward):
        # The mean of the scores that are found in nonsense may be 0 / 0.
        return not (has_answer and _NOT_FINITE.search(str(error)))
    if has_answer:
        return False
    if isinstance(error, ProgramFailed):
        return bool(error.refusal)  # by the gateway: of a call that no answer comes before
    # Other errors may come of the machine, or of a file that the workflow looks for in its working directory.
    return isinstance(error, InvalidRequest | InvalidEnvironment | PromptTooLong)


def _first(error: BaseException | None) -> BaseException | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# --------------------------------------------------------------------------- words


def _describe(recipe: Recipe, error: BaseException, words: str) -> str:
    return f"{line_of_error(recipe.folder, error) or _definition(recipe)}: {words}"


def _definition(recipe: Recipe) -> str:
    """The line at which the workflow begins."""
    workflow: Any = recipe.function("workflow")
    function: Callable[..., Any] = inspect.unwrap(
        workflow.step if isinstance(workflow, type) and issubclass(workflow, Environment) else workflow
    )
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None or not Path(code.co_filename).is_relative_to(recipe.folder):
        return f"{recipe.file.name}, in workflow"
    return f"{Path(code.co_filename).relative_to(recipe.folder)}:{code.co_firstlineno}, in {code.co_name}"


def _words(config: RunConfig, error: BaseException) -> str:
    first = _first(error)
    assert first is not None
    words = f"{type(first).__name__}: {text_of(first)}"
    if _COROUTINE in words:
        return f"{words}: {_AWAIT}"
    if isinstance(first, PromptTooLong) and first.max_new_tokens >= first.max_context:
        keys = [
            f"agents.{name}.sampling.max_new_tokens={agent.sampling.max_new_tokens}"
            for name, agent in config.agents.items()
            if agent.sampling.max_new_tokens == first.max_new_tokens
        ]
        return (
            f"{words}, or lower {' and '.join(keys) or 'max_new_tokens'}, which leaves no room for a prompt"
        )
    if isinstance(first, ProgramFailed):
        return _words_of_program(first)
    if isinstance(first, OSError) and not isinstance(first, FlexmarlError):
        return f"{words}; {EMPTY_FOLDER}"
    return words


def _words_of_program(error: ProgramFailed) -> str:
    """A program's failure in a line: its output may be long."""
    last = error.output.strip().rpartition("\n")[2]
    parts = (
        f"ProgramFailed: the program {error.command} {error.how}",
        error.refusal and f"the gateway's last refusal: {error.refusal}",
        last and f"its last line: {last}",
        "" if error.refusal else EMPTY_FOLDER,
    )
    return "; ".join(filter(None, parts))


def _reward_warnings(config: RunConfig, end: TrajectoryEnd) -> Iterator[str]:
    """The ways in which a training trajectory that succeeds trains nothing."""
    if end.trajectory.is_evaluation:
        return
    agents = {turn.agent for turn in end.trajectory.turns_to_reward()}
    rewards = end.trajectory.rewards
    for name in agents & config.trained_agents.keys():
        of_turns = config.agents[name].algorithm.used_rewards == "turn"
        if of_turns and name in rewards.before_punishment.by_agent and name not in rewards.of_turns:
            yield (
                f"agents.{name}.algorithm.rewards=turn: the workflow gave agent {name!r} a reward for a trajectory "
                "with random answers, and none of its turns: that one trains nothing. Give the turns theirs by "
                f"Rewards.of, or set agents.{name}.algorithm.rewards to trajectory or both"
            )
    if not agents:
        programs = end.trajectory.programs.ended
        who = f"the program {programs[-1].command}" if programs else "the workflow"
        hint = ": it finds its models by OPENAI_BASE_URL or ANTHROPIC_BASE_URL" if programs else ""
        query = end.trajectory.query.id
        yield f"{who} asked no agent for a turn with the query {query!r}: it trains nothing{hint}"


def _tool_warnings(end: TrajectoryEnd) -> Iterator[str]:
    """The parameters of tools whose schema has no type: the model has to guess what they take."""
    chats = [turn.request.chat for _, turn, _, _ in end.trajectory.ended_turns()]
    functions = [tool["function"] for chat in chats if chat is not None for tool in chat.tools]
    for function in functions:
        for name, schema in (function.get("parameters") or {}).get("properties", {}).items():
            if isinstance(schema, Mapping) and not schema.keys() & _TYPES:
                tool = function["name"]
                yield (
                    f"the tool {tool} has no type for its parameter {name!r}, so that the model is shown none: write "
                    f"it, as in `async def {tool}({name}: str)` or by a `type` in its schema"
                )


def unawaited_warnings(folder: Path, messages: Sequence[str]) -> Iterator[str]:
    """``messages``: Python's warnings of coroutines that were never awaited, with the lines that made them."""
    for message in messages:
        places = [
            f"{Path(file).relative_to(folder)}:{number}, in {function}"
            for file, number, function in _CREATED.findall(message)
            if Path(file).is_relative_to(folder)
        ]
        if places and "was never awaited" in message:
            yield f"{places[-1]}: {message.partition(chr(10))[0]}: {_AWAIT}"
