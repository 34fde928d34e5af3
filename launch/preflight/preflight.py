"""Starts the process of the checks, and turns its findings into one error."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from ...actors.errors import ConfigError
from .. import env
from ..placement.needed import DoesNotFit
from ..placement.run_placement import place_here
from ..run_config import RunConfig
from ..written_keys import WrittenKeys
from .engine_checks import engine_problems, sink_problems

# A recipe may load a large data set. One that hangs is ended.
_TIMEOUT_S = 1800.0
_LAST_LINES = 15


def check_before_start(config: RunConfig, keys: WrittenKeys) -> dict[str, str]:
    """Tries the recipe, engines, models, tokenizers and devices of ``config``. No file is written.

    Returns further variables for the environment of the run's actors: if the hub can't be reached and its cache has all
    that is needed, they use the cache alone. Raises ConfigError with every mistake, each with its key; ``keys`` has the
    keys as they are written.
    """
    findings = _findings(config)
    problems = [
        *dict.fromkeys(map(keys.in_text, engine_problems(config))),
        *sink_problems(config),
        *map(keys.in_text, findings["recipe"]),
        *_of_models(findings["models"], config, keys),
    ]
    if not any(problem["part"] == "device" for problem in findings["models"]):
        problems += dict.fromkeys(map(keys.in_text, _of_placement(config)))
    if problems:
        listed = "\n".join(_indented(problem) for problem in problems)
        raise ConfigError(f"{config.recipe}, checked before the start:\n{listed}")
    return env.cached_models_only() if findings["cached"] else {}


def _of_placement(config: RunConfig) -> list[str]:
    try:
        if config.network.listen is None:  # else other hosts may join
            place_here(config)
    except DoesNotFit as error:
        return error.problems
    return []


def _of_models(found: list[dict[str, str]], config: RunConfig, keys: WrittenKeys) -> Iterator[str]:
    """A line for each model: several policies may have the same one."""
    agents: dict[str, list[str]] = {}
    for problem in found:
        policy = problem["policy"]
        key = keys.key("policies", policy, "model", problem["part"])
        line = f"{key}={problem['value']!r}: {keys.in_text(problem['text'])}"
        agents.setdefault(line, []).extend(config.agents_of(policy))  # type: ignore[arg-type]  # a policy's name
    for line, names in agents.items():
        yield f"{line} (agent{'' if len(names) == 1 else 's'} {', '.join(names)})"


def _findings(config: RunConfig) -> dict[str, Any]:
    checks = subprocess.Popen(
        [sys.executable, "-m", "flexmarl.launch.preflight.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=env.preflight_environment(),
    )
    try:
        out, printed = checks.communicate(config.model_dump_json(), timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{config.recipe}: workflow.py was not imported, or its first queries not made, within {_TIMEOUT_S:g} s"
        ) from None
    finally:
        checks.kill()
        checks.wait()
    try:
        findings: dict[str, Any] = json.loads(out)
    except ValueError:
        last = "\n".join(printed.splitlines()[-_LAST_LINES:])
        ended = f"the process that imports workflow.py ended with status {checks.returncode}"
        return {"recipe": [f"{ended}\n{last}".rstrip()], "models": [], "cached": False}
    return findings


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
