"""Starts the process of the checks, and turns its findings into one error."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from ....actors.errors import ConfigError
from ....core.durable.private_directory import PrivateDirectory
from ....core.supervision.process_node import is_stopped
from ....core.telemetry import get_logger
from ...config.run_config import RunConfig
from ...config.written_config import WrittenConfig
from ...hosts import env
from ...hosts.host_description import describe_host
from ...hosts.placement.nearest_plan import plan_run
from ...hosts.placement.plan import DoesNotFit
from .data_comparison import DataComparison
from .engine_checks import engine_problems, sink_problems
from .network_checks import network_problems
from .trial_words import broken_trial_warning, overrun_warning

# A recipe may load a large data set. One that hangs is ended.
_TIMEOUT_S = 1800.0
# Lines come every 10 s.
_SILENCE_S = 30.0
_ERRORS_S = 5.0
# The trial ends itself at its deadline, unless the recipe blocks its event loop.
_LATE_S = 15.0
_LAST_LINES = 15

Notify = Callable[[str], object]

log = get_logger(__name__)


def log_check(text: str) -> None:
    """Notifies the log of this process."""
    log.warning(text)


def check_before_start(config: RunConfig, keys: WrittenConfig, notify: Notify = log_check) -> dict[str, str]:
    """Tries the recipe, engines, models, tokenizers and devices of ``config``, and plays a trajectory. No file is left.
    ``notify``: is called with warnings, and with the line of the recipe at which checks stand that take long.

    Returns further variables for the environment of the run's actors: if the hub can't be reached and its cache has all
    that is needed, they use the cache alone. Raises ConfigError with every mistake, each with its key; ``keys`` has the
    keys as they are written.
    """
    findings = _findings(config, notify)
    problems = [
        *dict.fromkeys(map(keys.in_text, engine_problems(config))),
        *sink_problems(config),
        *network_problems(config),
        *dict.fromkeys(map(keys.in_text, findings["recipe"])),
        *_of_models(findings["models"], config, keys),
    ]
    if not any(problem["part"] == "device" for problem in findings["models"]):
        problems += dict.fromkeys(_of_placement(config, keys))
    for warning in findings.get("warnings", ()):
        notify(f"warning: {keys.in_text(warning)}")
    if problems:
        listed = "\n".join(_indent(problem) for problem in problems)
        raise ConfigError(f"{config.recipe}, checked before the start:\n{listed}")
    return env.cached_models_only() if findings["cached"] else {}


def _of_placement(config: RunConfig, keys: WrittenConfig) -> list[str]:
    try:
        if config.network.listen is None:  # else other hosts may join
            plan_run(config, [describe_host()], keys, all_models=False)
    except DoesNotFit as error:
        return error.problems
    return []


def _of_models(problems: list[dict[str, str]], config: RunConfig, keys: WrittenConfig) -> Iterator[str]:
    """A line for each model: several policies may have the same one."""
    agents: dict[str, list[str]] = {}
    for problem in problems:
        policy = problem["policy"]
        key = keys.key("policies", policy, "model", problem["part"])
        line = f"{key}={problem['value']!r}: {keys.in_text(problem['text'])}"
        agents.setdefault(line, []).extend(config.agents_of(policy))  # type: ignore[arg-type]  # a policy's name
    for line, names in agents.items():
        yield f"{line} (agent{'' if len(names) == 1 else 's'} {', '.join(names)})"


def _findings(config: RunConfig, notify: Notify) -> dict[str, Any]:
    directory = PrivateDirectory()  # removed here: the processes may be killed
    try:
        environment = env.preflight_environment(directory.path)
        if not config.checks.trajectory:
            return _findings_in(directory.path, environment, config, notify)
        with DataComparison.begin(config, directory.path, environment) as comparison:
            findings = _findings_in(directory.path, environment, config, notify)
            if not findings["recipe"]:
                findings["recipe"] += comparison.problems(findings["digests"])
        return findings
    finally:
        directory.remove()


def _findings_in(
    directory: Path, environment: dict[str, str], config: RunConfig, notify: Notify
) -> dict[str, Any]:
    checks = subprocess.Popen(
        [sys.executable, "-P", "-m", "flexmarl.launch.run.preflight.process", str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
    )
    lines: SimpleQueue[str] = SimpleQueue()
    printed: deque[str] = deque(maxlen=_LAST_LINES)
    try:
        _begin(_write, checks.stdin, config.model_dump_json())
        _begin(_read_lines, checks.stdout, lines)
        errors = _begin(_read_errors, checks.stderr, printed)
        findings = _answer(checks, lines, config, notify)
        if findings is not None and findings.get("trial"):
            trial = _trial_answer(checks, lines, config, notify)
            findings["recipe"] += trial["problems"]
            findings["warnings"] += trial["warnings"]
    finally:
        checks.kill()
        checks.wait()
    if findings is not None:
        return findings
    errors.join(_ERRORS_S)
    ended = f"the process that imports workflow.py ended with status {checks.returncode}"
    return {"recipe": [f"{ended}\n{''.join(printed)}".rstrip()], "models": [], "cached": False}


def _answer(
    checks: "subprocess.Popen[str]", lines: "SimpleQueue[str]", config: RunConfig, notify: Notify
) -> dict[str, Any] | None:
    """The findings; None if the process ends without. Raises ConfigError if they take too long."""
    began, place = time.monotonic(), ""
    while True:
        try:
            line = lines.get(timeout=_SILENCE_S)
        except Empty:
            if checks.poll() is not None:  # a process that the recipe has started has its pipe
                return None
            stopped = f" (process {checks.pid}, stopped by a signal)" if is_stopped(checks.pid) else ""
            silent = f"; the process of the checks does not answer{stopped}"
        else:
            try:
                message: dict[str, Any] = json.loads(line)
            except ValueError:  # it has ended, perhaps within a line
                return None
            if "recipe" in message:
                return message
            place, silent = message["at"], ""
        seconds = time.monotonic() - began
        at = f"; it {'last stood' if silent else 'stands'} at {place}" if place else ""
        if seconds > _TIMEOUT_S:
            raise ConfigError(
                f"{config.recipe}: workflow.py was not imported, or its first queries not made, within "
                f"{_TIMEOUT_S:g} s{at}{silent}"
            )
        notify(f"checking {config.recipe} for {seconds:.0f} s, of at most {_TIMEOUT_S:g}{at}{silent}")


def _trial_answer(
    checks: "subprocess.Popen[str]", lines: "SimpleQueue[str]", config: RunConfig, notify: Notify
) -> dict[str, list[str]]:
    """The findings of the trial; a warning if the process ends or hangs in it."""
    limit_s = config.checks.trajectory_timeout_s
    began, place = time.monotonic(), None
    while (left_s := began + limit_s + _LATE_S - time.monotonic()) > 0:
        try:
            message: dict[str, Any] = json.loads(lines.get(timeout=left_s))
        except Empty:
            break
        except ValueError:  # it has ended, perhaps within a line
            with contextlib.suppress(subprocess.TimeoutExpired):
                checks.wait(_ERRORS_S)
            warning = f"its process ended with status {checks.returncode}"
            return {"problems": [], "warnings": [broken_trial_warning(warning)]}
        if "at" not in message:
            return message
        if message["at"]:
            place, seconds = message["at"], time.monotonic() - began
            notify(
                f"playing {config.recipe} for {seconds:.0f} s, of at most {limit_s:g}; it stands at {place}"
            )
    return {"problems": [], "warnings": [overrun_warning(limit_s, place)]}


def _begin(work: Callable[..., None], *arguments: Any) -> threading.Thread:
    """Begins a thread that is not waited for: a process that a recipe has started may hold the pipe of the checks."""
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def _write(pipe: IO[str], text: str) -> None:
    with contextlib.suppress(BrokenPipeError), pipe:
        pipe.write(text)


def _read_lines(pipe: IO[str], lines: "SimpleQueue[str]") -> None:
    """An empty line is the end."""
    with pipe:
        for line in pipe:
            lines.put(line)
    lines.put("")


def _read_errors(pipe: IO[str], printed: "deque[str]") -> None:
    with pipe:
        printed.extend(pipe)


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
