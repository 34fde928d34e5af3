"""Starts the process of the checks, and turns its findings into one error."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...actors.errors import ConfigError
from ...core.telemetry import get_logger
from .. import env
from ..placement.needed import DoesNotFit
from ..placement.run_placement import place_here
from ..run_config import RunConfig
from ..written_keys import WrittenKeys
from .engine_checks import engine_problems, sink_problems

# A recipe may load a large data set. One that hangs is ended.
_TIMEOUT_S = 1800.0
_SILENCE_S = 60.0
_LAST_LINES = 15

Notify = Callable[[str], object]

log = get_logger(__name__)


def log_check(text: str) -> None:
    """Notifies the log of this process."""
    log.warning(text)


def check_before_start(config: RunConfig, keys: WrittenKeys, notify: Notify = log_check) -> dict[str, str]:
    """Tries the recipe, engines, models, tokenizers and devices of ``config``. No file is written. ``notify``: is
    called with the line of the recipe at which checks stand that take long.

    Returns further variables for the environment of the run's actors: if the hub can't be reached and its cache has all
    that is needed, they use the cache alone. Raises ConfigError with every mistake, each with its key; ``keys`` has the
    keys as they are written.
    """
    findings = _findings(config, notify)
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


def _findings(config: RunConfig, notify: Notify) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "flexmarl.launch.preflight.process"]
    environment, pipe = env.preflight_environment(), subprocess.PIPE
    with (
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace", env=environment
        ) as checks,
        _killed_after(checks, _TIMEOUT_S + _SILENCE_S),
        ThreadPoolExecutor(1) as reader,
    ):
        printed = reader.submit(_last_lines, checks)
        try:
            found = _answer(checks, config, notify)
        except BaseException:  # the reader would wait for the process's end
            checks.kill()
            raise
    if found is not None:
        return found
    ended = f"the process that imports workflow.py ended with status {checks.returncode}"
    return {"recipe": [f"{ended}\n{printed.result()}".rstrip()], "models": [], "cached": False}


@contextlib.contextmanager
def _killed_after(process: "subprocess.Popen[str]", seconds: float) -> Iterator[None]:
    """Kills ``process`` if the context takes longer: it may be stopped, and report nothing."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _answer(checks: "subprocess.Popen[str]", config: RunConfig, notify: Notify) -> dict[str, Any] | None:
    """The findings; None if the process ends without. Raises ConfigError if they take too long."""
    assert checks.stdin is not None and checks.stdout is not None
    with contextlib.suppress(BrokenPipeError), checks.stdin:
        checks.stdin.write(config.model_dump_json())
    began, place = time.monotonic(), ""
    for line in checks.stdout:  # a line every few seconds at least (``process.py``), until the process ends
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError:
            return None  # it has died within a line
        if "recipe" in message:
            return message
        seconds, place = time.monotonic() - began, message["at"]
        at = f" at {place}" if place else ""
        if seconds > _TIMEOUT_S:
            raise ConfigError(
                f"{config.recipe}: workflow.py was not imported, or its first queries not made, within "
                f"{_TIMEOUT_S:g} s; it stands{at}"
            )
        notify(f"checking {config.recipe} for {seconds:.0f} s, of at most {_TIMEOUT_S:g}{at}")
    return None


def _last_lines(checks: "subprocess.Popen[str]") -> str:
    assert checks.stderr is not None
    return "".join(deque(checks.stderr, maxlen=_LAST_LINES))


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
