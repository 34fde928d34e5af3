"""The end of a run in words, for the person who started it. Pure."""

import errno
import shlex
from collections.abc import Mapping
from pathlib import Path

from ...actors import errors as role_errors
from ...actors.errors import (
    CheckpointMismatch,
    ConfigError,
    DataChanged,
    RecipeError,
    SamplesLost,
    UnsupportedModel,
)
from ...actors.messages import RunResult
from ...core.base.texts import text_of
from ...core.errors import ActorDead, ActorFailed
from ..errors import Interrupted
from ..monitoring.formatting import OF_REWARDS, change, count, duration

_REPEATED = (ConfigError, RecipeError, DataChanged, UnsupportedModel, CheckpointMismatch)
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.ENODEV)
_REPEATED_KINDS = frozenset(kind.__name__ for kind in _REPEATED)
_OWN_KINDS = frozenset(name for name, kind in vars(role_errors).items() if isinstance(kind, type))


def run_summary(
    result: RunResult, *, first: int, folder: Path, report: Path, wall_s: float, held_out: bool
) -> str:
    """The result, and the paths of its files. ``first``: steps that finished before a resume. ``held_out``:
    the evaluation's queries are not used in training."""
    if result.stopped:
        head = _stopped_text(result, folder)
    else:
        steps = f"{count(result.last_step - first, 'step')}{f' after step {first}' if first else ''}"
        work = f"Trained {steps}" if result.last_step else "Evaluated"
        head = f"{work} in {duration(wall_s)}. {learning_text(result.evaluations, first, held_out)}"
    return (
        f"{head.rstrip()}\n"
        f"  report       {report}\n"
        f"  metrics      {folder / 'metrics.jsonl'}\n"
        f"  checkpoints  {result.checkpoint or 'none yet'}"
    )


def _stopped_text(result: RunResult, folder: Path) -> str:
    """The end of a stopped run, with the command that continues it if there is a checkpoint."""
    if not result.checkpoint:
        return f"Stopped after step {result.last_step}, before the first checkpoint."
    return f"Stopped after step {result.last_step}. Continue with: flexmarl train --resume {shlex.quote(str(folder))}"


def learning_text(evaluations: Mapping[int, Mapping[str, float]], first: int, held_out: bool) -> str:
    """The first and the last evaluation of the whole run, as a sentence; rewards only if there is no other metric."""
    steps = sorted(evaluations)
    if not steps:
        return ""
    before, after = evaluations[steps[0]], evaluations[steps[-1]]
    changes = []
    for name in evaluated_names(evaluations):
        form = ".1%" if "accuracy" in name else ".3f"
        compared = len(steps) > 1 and name in before
        came = change(before[name], after[name], form) if compared else f"is {after[name]:{form}}"
        changes.append(f"{name} {came}")
    if not changes:
        return ""
    where = "On problems that training never used" if held_out else "In the evaluations"
    since = " since the run's beginning" if first else ""
    return f"{where}, {', '.join(changes)}{since}."


def evaluated_names(evaluations: Mapping[int, Mapping[str, float]]) -> list[str]:
    """The metrics of the last evaluation that say how much was learned: rewards only if there is no other metric."""
    last = evaluations[max(evaluations)] if evaluations else {}
    return [name for name in last if not name.startswith(OF_REWARDS)] or list(last)


def failure_text(error: BaseException, folder: Path, checkpoint: Path | None) -> str:
    """A failure or a stop at once, after its details, and the way to continue if there is one. ``checkpoint``: the
    newest."""
    stopped = isinstance(error, Interrupted)
    text = error_text(error)
    head, *more = text.splitlines() or [type(error).__name__]
    lines = [*more, ""] if more else []
    lines += [f"The run {'was' if stopped else 'failed:'} {head}", f"  events and logs  {folder}"]
    if checkpoint is not None:
        lines.append(f"  last checkpoint  {checkpoint}")
    if not repeats(error):
        if checkpoint is not None:
            lines.append(f"  continue with    flexmarl train --resume {shlex.quote(str(folder))}")
        elif not isinstance(error, ActorFailed):
            lines.append(f"  start again with flexmarl train --resume {shlex.quote(str(folder))}")
    return "\n".join(lines)


def error_text(error: BaseException) -> str:
    """The error once. Of a failed actor: the error that was raised first, with the actor that raised it; one of our own
    errors names in its text all that matters."""
    if isinstance(error, ActorFailed) and error.kind in _OWN_KINDS:
        return error.error.rstrip()
    return text_of(error).rstrip()


def has_lost_samples(error: BaseException) -> bool:
    """True if the run has ended because samples of groups that are trained in part were lost with their host: it
    continues from its newest checkpoint, as no group may be trained half."""
    return isinstance(error, ActorFailed) and error.kind == SamplesLost.__name__


def repeats(error: BaseException) -> bool:
    """True for a mistake in the config, the recipe or the model: the same run would fail in the same way."""
    if isinstance(error, ActorFailed) and not isinstance(error, ActorDead):
        return error.kind in _REPEATED_KINDS
    if isinstance(error, OSError) and error.errno in _NOT_HERE:  # of network.listen
        return True
    return isinstance(error, _REPEATED)
