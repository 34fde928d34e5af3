"""Demonstrations: the recorded actions of a query's agents, one trajectory a line of a file.

    {"query": "b1>e4#c2", "actions": {"planner": ["DR", "RD"], "executor": ["D", "R"]}}

``query`` is the text of the query: its id may change with the source that draws it. ``actions`` are the answers of each
agent, in the order of its turns. The package belongs to no role: environments follow demonstrations, rollout workers
and the check before a run read them, and ``flexmarl samples`` writes them.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.base.texts import guess, half_problem
from ..errors import RecipeError


@dataclass(frozen=True, slots=True)
class Demonstration:
    """The recorded trajectory of a query. ``actions``: by agent. ``place``: its file and line, for messages."""

    actions: Mapping[str, tuple[str, ...]]
    place: str


def read_demonstrations(name: str, folder: Path, agents: Collection[str]) -> dict[str, Demonstration]:
    """Returns the demonstrations of the file ``name`` by the text of their query. ``folder``: the recipe's; a relative
    name is looked for there, then in the working directory. ``agents``: of the config.

    Raises RecipeError, with the file and the line, for a file that is missing or empty, an invalid line, an
    agent that the config lacks, and a second demonstration of a query.
    """
    key = f"rollout.demonstrations.file={name}"
    file = next((place for place in (folder / name, Path(name)) if place.is_file()), None)
    if file is None:
        raise RecipeError(f"{key}: there is no such file in {folder} or {Path.cwd()}")
    try:
        # Not splitlines: a text in JSON may hold other ends of lines, as U+2028.
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{key}: {file} can't be read as text: {error}") from None
    demonstrations: dict[str, Demonstration] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        query, actions = _read_line(line, place, agents)
        if (earlier := demonstrations.get(query)) is not None:
            raise RecipeError(
                f"{place}: the query {query!r:.80} has a demonstration already, in {earlier.place}: "
                "leave one of them out"
            )
        demonstrations[query] = Demonstration(actions, place)
    if not demonstrations:
        raise RecipeError(
            f"{key}: {file} has no demonstration: write one a line, or leave rollout.demonstrations out"
        )
    return demonstrations


def demonstration_line(query: str, actions: Mapping[str, Sequence[str]]) -> str:
    """Returns the line of a file for the demonstration of the query with this text, without its end. ``actions``: by
    agent, each a text that is not empty. In ASCII: no character of an answer can end the line."""
    return json.dumps({"query": query, "actions": {agent: [*texts] for agent, texts in actions.items()}})


def _read_line(line: str, place: str, agents: Collection[str]) -> tuple[str, dict[str, tuple[str, ...]]]:
    try:
        content: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{place}: is not JSON: {error}") from None
    if not isinstance(content, dict) or content.keys() != {"query", "actions"}:
        shown = ", ".join(content) if isinstance(content, dict) else type(content).__name__
        raise RecipeError(
            f'{place}: has {shown or "no key"}: needs {{"query": TEXT, "actions": {{AGENT: [TEXT, ...]}}}}'
        )
    if problem := half_problem(content):
        raise RecipeError(f"{place}: {problem}")
    query, actions = content["query"], content["actions"]
    if not isinstance(query, str):
        raise RecipeError(f"{place}: query is {type(query).__name__}, needs the text of the query")
    if not isinstance(actions, dict) or not actions:
        raise RecipeError(f"{place}: actions has no agent: needs {{AGENT: [TEXT, ...]}}")
    for agent, texts in actions.items():
        if agent not in agents:
            raise RecipeError(
                f"{place}: agent {agent!r} is not in the config; it has: {', '.join(agents)}{guess(agent, agents)}"
            )
        if (
            not isinstance(texts, list)
            or not texts
            or not all(isinstance(text, str) and text for text in texts)
        ):
            raise RecipeError(f"{place}: actions.{agent} needs a list of texts, none of them empty")
    return query, {agent: tuple(texts) for agent, texts in actions.items()}
