"""Checks a recipe's functions against the config: their signatures, the keys of ``data``, and the first queries."""

import inspect
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....actors.demonstrations.demonstration import read_demonstrations
from ....actors.environments.demonstrated_play import follow_problem
from ....actors.environments.environment import environment_problems
from ....actors.environments.tree_play import branch_problem
from ....actors.errors import ConfigError, RecipeError
from ....actors.messages import Query, refuse_equal_ids
from ....actors.names import PolicyName, Step, Version
from ....actors.orchestrator.opponents.past_pool import Member, PastPool
from ....actors.orchestrator.opponents.rules import RULES, draw_member, rule_of_function
from ....actors.orchestrator.queries.position_source import digest
from ....actors.orchestrator.queries.recipe_source import RecipeSource
from ....actors.recipe.named_function import named_function
from ....actors.recipe.recipe import Recipe
from ...config.run_config import RunConfig
from ...monitoring.sinks.function_sink import load_function
from ...monitoring.sinks.sink_config import FunctionConfig
from .data_comparison import random_data_problem

_FORMS = {
    "workflow": "async def workflow(query, agents)",
    "train_query": "def train_query(position, seed, **data)",
    "query_source": "def query_source(positions, seed, **data)",
    "eval_queries": "def eval_queries(seed, **data)",
    "sft": "def sft(agent, batch, size, seed, **data)",
    "setup": "async def setup(**data)",
    "teardown": "async def teardown()",
}
_POSITIONAL = {
    "workflow": 2,
    "train_query": 2,
    "query_source": 2,
    "eval_queries": 1,
    "sft": 4,
    "setup": 0,
    "teardown": 0,
}
COMPARED = 16
"""Queries that are made again, here and in another process."""
_DRAW_S = 5.0
_FURTHER = 256
_FURTHER_S = 2.0
_STEPS_S = 0.5
_ASYNC = ("workflow", "setup", "teardown")
_WITHOUT_DATA = ("workflow", "teardown")


@dataclass(slots=True)
class RecipeFindings:
    """``problems``: every mistake that shows without a model. ``recipe``: None if it can't be loaded. ``digests``: of
    the first queries of ``train_query``. ``training``, ``evaluation``: queries of the first step, and all of the
    evaluation's, if the functions could be called. ``further``: a sample of the training queries of later steps."""

    problems: list[str] = field(default_factory=list)
    recipe: Recipe | None = None
    digests: list[str] = field(default_factory=list)
    training: list[Query] = field(default_factory=list)
    further: list[Query] = field(default_factory=list)
    evaluation: list[Query] = field(default_factory=list)


def recipe_findings(config: RunConfig) -> RecipeFindings:
    """Loads the recipe; its functions are not called before their signatures fit."""
    findings = RecipeFindings()
    try:
        findings.recipe = Recipe(config.recipe_config())
    except RecipeError as error:
        findings.problems.append(str(error))
        return findings
    findings.problems += _function_mistakes(config, findings.recipe)
    if not findings.problems:
        try:
            findings.problems.extend(_data_problems(config, findings))
        except RecipeError as error:  # a function of the recipe raises, or gives what it must not
            findings.problems.append(str(error))
    return findings


def mentions(folder: Path, words: re.Pattern[str]) -> bool:
    """True if the recipe's own code has one of ``words``."""
    return any(words.search(file.read_text(errors="replace")) for file in folder.glob("**/*.py"))


def _function_mistakes(config: RunConfig, recipe: Recipe) -> list[str]:
    optional = ("query_source", "sft", "setup", "teardown")
    functions = ["train_query"] if recipe.defines("train_query") else []
    functions += ["eval_queries", *(name for name in optional if recipe.defines(name))]
    problems = list(_missing_sft(config, recipe))
    workflow = recipe.function("workflow")
    if isinstance(workflow, type):
        problems += _environment_problems(workflow, recipe.file.name, config.data)
    else:
        functions.insert(0, "workflow")
    problems += _rule_problems(config, recipe)
    problems += _play_problems(config, recipe)
    for name in functions:
        problems += _signature_problems(name, recipe.function(name), recipe.file.name, config.data)
    return list(dict.fromkeys(problems))


def _play_problems(config: RunConfig, recipe: Recipe) -> Iterator[str]:
    """A line for a workflow that can't branch or follow a demonstration, and for a file without demonstrations."""
    cls, tree, rule = recipe.environment_class, config.rollout.tree, config.rollout.demonstrations
    if tree is not None and (problem := branch_problem(cls, tree)):
        yield problem
    if rule is None:
        return
    if problem := follow_problem(cls):
        yield problem
        return
    try:
        read_demonstrations(rule.file, recipe.folder, config.agents)
    except RecipeError as error:
        yield str(error)


def function_problems(config: RunConfig) -> Iterator[str]:
    """A line for each sink that is a function which can't be called."""
    for number, sink in enumerate(config.sinks):
        if isinstance(sink, FunctionConfig):
            try:
                load_function(Path(config.recipe), sink.function)
            except Exception as error:  # noqa: BLE001  # importing a user's file may raise anything
                yield f"sinks.{number}.function={sink.function}: {_words(error)}"


def filter_problems(config: RunConfig) -> Iterator[str]:
    """A line for each group filter that is a function which can't be called."""
    recipe = Recipe(config.recipe_config()) if config.rollout.filters else None
    for number, settings in enumerate(config.rollout.filters):
        assert recipe is not None, "there are filters"
        try:
            settings.load(recipe)
        except RecipeError as error:
            yield f"rollout.filters.{number}: {error}"


def loss_problems_of(config: RunConfig) -> Iterator[str]:
    """A line for each mistake of a loss that is a user's function: it is tried on made-up tokens."""
    losses = {name: policy.algorithm for name, policy in config.trained.items() if policy.algorithm.loss}
    if not losses:
        return
    # Imported here: it takes seconds, and most runs have no such loss.
    from ....actors.trainer.objective.users_loss import UsersLoss, loss_problems

    recipe = Recipe(config.recipe_config())
    for name, loss in losses.items():
        assert loss.loss is not None, "those without are left out"
        key = f"policies.{name}.algorithm.loss={loss.loss}"
        try:
            function = named_function(recipe.folder, loss.loss)
        except Exception as error:  # noqa: BLE001  # importing a user's file may raise anything
            yield f"{key}: {_words(error)}"
            continue
        for problem in loss_problems(function, UsersLoss(loss.loss, function, recipe.frames), loss):
            yield f"{key}: {problem}"


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


def _missing_sft(config: RunConfig, recipe: Recipe) -> Iterator[str]:
    for name, policy in config.policies.items():
        if policy.sft.batches and not recipe.defines("sft"):
            yield f"policies.{name}.sft.batches={policy.sft.batches}: {recipe.file.name} defines no sft"


def _rule_problems(config: RunConfig, recipe: Recipe) -> Iterator[str]:
    """The mistakes in the rules by which pools of past versions draw; a function of the recipe is tried once."""
    for name, policy in config.policies.items():
        if (pool := policy.pool_of) is None or pool.rule in RULES:
            continue
        key = f"policies.{name}.pool_of.rule={pool.rule}"
        try:
            rule = recipe.function(pool.rule)
        except RecipeError:
            yield f"{key}: neither one of {', '.join(RULES)} nor a function in {recipe.file.name}"
            continue
        parameters = list(inspect.signature(rule).parameters.values())
        if inspect.iscoroutinefunction(inspect.unwrap(rule)):
            yield f"{key}: it is async: write `def {pool.rule}(members)`"
        elif (problem := _misfit(parameters, 1, None)) is not None:
            yield f"{key}: " + problem.format(
                file=recipe.file.name, name=pool.rule, form=f"def {pool.rule}(members)"
            )
        else:
            yield from _trial_of_rule(rule, name, pool.policy, key)


def _trial_of_rule(
    rule: Callable[..., Any], policy: PolicyName, learner: PolicyName, key: str
) -> Iterator[str]:
    pool = PastPool([Member(learner, Step(step), Version(step)) for step in range(2)])
    try:
        draw_member(rule_of_function(rule), pool, learner, 0, policy, Step(1))
    except RecipeError as error:
        yield f"{key}: {error}"
    except Exception as error:  # noqa: BLE001  # user code
        yield f"{key}: for two members without games it raises {type(error).__name__}: {error}"


# --------------------------------------------------------------------------- signatures


def _signature_problems(
    name: str, function: Callable[..., Any], file: str, data: dict[str, Any] | None
) -> Iterator[str]:
    is_async = inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # an object may be called too, and be async
    )
    if is_async != (name in _ASYNC):
        yield f"{file}: {name} is {'' if is_async else 'not '}async: write `{_FORMS[name]}`"
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function without a signature, written in C
        return
    data = None if name in _WITHOUT_DATA else data
    if (problem := _misfit(parameters, _POSITIONAL[name], data)) is not None:
        yield problem.format(file=file, name=name, form=_FORMS[name])


def _environment_problems(cls: type[Any], file: str, data: dict[str, Any] | None) -> Iterator[str]:
    """The mistakes of the environment that ``workflow`` names."""
    yield from (f"{file}: {problem}" for problem in environment_problems(cls))
    setup = list(inspect.signature(cls.setup).parameters.values()) if hasattr(cls, "setup") else []
    if (problem := _misfit(setup, 1, data)) is not None:
        form = "async def setup(self, **data)"
        yield problem.format(file=file, name=f"{cls.__name__}.setup", form=form)


def _misfit(
    parameters: Sequence[inspect.Parameter], positional: int, data: dict[str, Any] | None
) -> str | None:
    """The first reason for which a call with ``positional`` arguments and ``data`` fails; None if it fits. ``data``:
    None for a function that does not get it."""
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(by_position) < positional and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return "{file}: {name} takes too few arguments: write `{form}`"
    named = [p for p in by_position[positional:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    named += [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    names = {p.name for p in named}
    extra = [key for key in data or () if key not in names]
    if extra and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        takes = f"it takes: {', '.join(sorted(names))}" if names else "it takes none"
        return f"data.{extra[0]}: {{name}} in {{file}} has no argument {extra[0]!r}; {takes}"
    missing = [p.name for p in named if p.default is p.empty and p.name not in (data or ())]
    if missing and data is None:
        return f"{{file}}: {{name}} requires {missing[0]!r} too: write `{{form}}`"
    if missing:
        return f"data.{missing[0]} is missing: {{name}} in {{file}} requires it"
    return None


# --------------------------------------------------------------------------- data


def _data_problems(config: RunConfig, findings: RecipeFindings) -> Iterator[str]:
    """Calls the functions for the beginning of a run. Raises RecipeError if one of them fails."""
    recipe = findings.recipe
    assert recipe is not None, "it has been loaded"
    source = RecipeSource(recipe)
    first = findings.training = _first_queries(config, source)
    if config.training.steps:
        refuse_equal_ids(first, f"{recipe.file.name}: step 1")
    if config.training.steps and config.checks.trajectory and recipe.defines("train_query"):
        compared = min(COMPARED, len(first))
        findings.digests = (
            [*map(digest, first[:compared])] if not recipe.has_source else first_digests(recipe, compared)
        )
        yield from _random_data(findings.digests, first_digests(recipe, compared))
    if config.checks.trajectory and not recipe.has_source:
        problems = [*_draw_further(config, findings)]
        yield from problems
        if not problems:
            _refuse_equal_ids_later(config, recipe)
    if recipe.has_source:
        yield from _restoring_problems(recipe, source)
    queries = findings.evaluation = recipe.eval_queries()
    ids = [query.id for query in queries]
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        yield f"{recipe.file.name}: eval_queries gives two queries the id {twice!r}"
    if config.evaluation.held_out:
        yield from _not_held_out(first, queries)
    for policy in config.policies:
        for agent in config.agents_of(policy) if config.policies[policy].sft.batches else ():
            recipe.sft(agent, 0, config.policies[policy].sft.batch_size)


def _first_queries(config: RunConfig, source: RecipeSource) -> list[Query]:
    """The queries of the first step; fewer if the recipe takes long to make them, unless all are to be compared."""
    ends_at = math.inf if config.evaluation.held_out else time.monotonic() + _DRAW_S
    queries: list[Query] = []
    while len(queries) < config.training.queries_per_step and (not queries or time.monotonic() < ends_at):
        queries += source.draw([], 1, 1)[0]
    return queries


def _draw_further(config: RunConfig, findings: RecipeFindings) -> Iterator[str]:
    """Draws queries of ``train_query`` at equal distances over the steps that follow the first one, as many as a short
    time allows. A line for the first that fails: the run would end there."""
    assert findings.recipe is not None, "it has been loaded"
    size, begin = config.training.queries_per_step, len(findings.training)
    positions = range(
        begin, config.training.steps * size, max(1, (config.training.steps * size - begin) // _FURTHER)
    )
    ends_at = time.monotonic() + _FURTHER_S
    for position in positions[:_FURTHER]:
        if time.monotonic() > ends_at:
            return
        try:
            findings.further.append(findings.recipe.train_query(position))
        except RecipeError as error:
            yield f"train_query({position}, seed), a query of step {position // size + 1}: {error}"
            return


def _refuse_equal_ids_later(config: RunConfig, recipe: Recipe) -> None:
    """Draws the steps behind the first one, as many as a short time allows: an id that is made of a drawn task comes
    twice only in some step. Raises RecipeError: the run would end there."""
    size, ends_at = config.training.queries_per_step, time.monotonic() + _STEPS_S
    for step in range(2, config.training.steps + 1):
        if time.monotonic() > ends_at:
            return
        positions = range((step - 1) * size, step * size)
        refuse_equal_ids(map(recipe.train_query, positions), f"{recipe.file.name}: step {step}")


def first_digests(recipe: Recipe, count: int) -> list[str]:
    """The digests of the first queries of ``train_query``. Raises RecipeError."""
    return [digest(recipe.train_query(position)) for position in range(count)]


def _random_data(first: Sequence[str], second: Sequence[str]) -> Iterator[str]:
    position = next((n for n, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]), None)
    if position is not None:
        yield random_data_problem(position, "when it is called again")


def _restoring_problems(recipe: Recipe, source: RecipeSource) -> Iterator[str]:
    """A line if a source does not continue from its state as if it had not been interrupted."""
    restored = RecipeSource(recipe)
    restored.restore(source.state_after([]).without_digests())
    (expected,), _ = source.draw([], 2, 1)
    (query,), _ = restored.draw([], 2, 1)
    if digest(query) != digest(expected):
        yield (
            f"{recipe.file.name}: query_source: a source that was restored continues with the query {query.id!r}, "
            f"which differs from the query {expected.id!r} that the other one gives"
        )


def _not_held_out(training: Sequence[Query], evaluation: Sequence[Query]) -> Iterator[str]:
    """``training``: the queries of the first step."""
    by_text = {query.text: query for query in evaluation}
    for position, query in enumerate(training):
        same = by_text.get(query.text)
        if same is not None and same.data == query.data:
            yield (
                f"evaluation.held_out=true, but training query {query.id!r} (position {position}) is evaluation query "
                f"{same.id!r} too"
            )
            return
