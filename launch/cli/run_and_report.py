"""Runs a prepared run until its end, again after a loss if it may be, and reports how it ended."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import uvloop

from ...actors.orchestrator import checkpoint
from ...core.durable.files import open_private
from ...core.errors import FlexmarlError, is_loss
from ...core.telemetry import LogLevel, configure_logging
from ..config.config_reading import flattened
from ..errors import Interrupted, LostActor
from ..hosts.nodes.joined_cluster import NodeRequest
from ..monitoring.console.output import Output
from ..monitoring.slowness.words import finding_lines
from ..run.prepared_run import PreparedRun, resume_from_newest_checkpoint
from ..run.run import Run
from ..run.run_endings import failure_text, has_lost_samples, run_summary
from ..run_folder.run_directory import RunDirectory
from ..run_folder.run_findings import run_findings
from .exit_status import EXIT_FAILED, EXIT_STOPPED
from .signals import train_until_signal


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a command that are not part of the run's configuration. ``log_level``: of the files in ``logs/``.
    ``restarts``: after the loss of an actor, at most this many without a newer checkpoint in between. ``nodes``: the
    other hosts."""

    output: Output
    log_level: LogLevel = "info"
    restarts: int = 0
    nodes: NodeRequest = field(default_factory=NodeRequest)


def run_with_restarts(
    first: PreparedRun | None,
    directory: RunDirectory,
    options: RunOptions,
    overrides: Sequence[str] = (),
    accepted: Sequence[str] = (),
) -> int:
    """Runs until the end, and again after the loss of an actor, or of samples with a host: this one without
    ``--restarts``, as often as the run has other hosts without a newer checkpoint in between. Returns the exit status.

    ``first``: a new run; None: the run continues from its newest checkpoint, or from the beginning before the first;
    so does every restart, on the nodes that are there then, also fewer. ``overrides``, ``accepted``: see
    ``resuming.plan_resume``.
    """
    prepared = first
    restarts_left = most = Counter({False: options.restarts, True: max(1, options.nodes.count)})
    while True:
        prepared = prepared or resume_from_newest_checkpoint(
            directory, overrides, accepted, options.output.note, options.nodes.count
        )
        start = prepared.start
        if start.is_complete:
            options.output.answer(f"{directory.path} is complete: all {start.step} steps are trained")
            return 0
        if prepared is not first:
            options.output.note(
                f"continuing after {start.place}" if start.checkpoint else "no checkpoint yet: starting again"
            )
        try:
            return run_prepared(prepared, options)
        except LostActor as lost:  # already reported
            folders = checkpoint.complete(directory.checkpoints)
            if folders and (start.checkpoint is None or folders[-1] != start.checkpoint[0]):
                restarts_left = most
            if not restarts_left[lost.with_samples]:
                return EXIT_FAILED
            restarts_left, prepared = restarts_left - Counter([lost.with_samples]), None
            options = replace(options, nodes=replace(options.nodes, fewer=True))


def run_prepared(prepared: PreparedRun, options: RunOptions) -> int:
    """Runs until the end or a failure, and reports it. Raises LostActor, reported too: a restart may follow."""
    directory, config, first = prepared.directory, prepared.start.config, prepared.start.step
    display = options.output.display(config, directory.path.name, first)
    try:
        with open_private(directory.logs / "launcher.log", "a") as log:
            configure_logging("launcher", log, options.log_level)
            run = Run.from_prepared(prepared, display, options.log_level, options.nodes)
            result = uvloop.run(train_until_signal(run, display))
    except KeyboardInterrupt:  # before the run's own signal handlers are set
        return _report_failure(Interrupted("stopped by SIGINT"), directory, options.output)
    except (FlexmarlError, OSError, asyncio.CancelledError) as error:
        status = _report_failure(error, directory, options.output)
        if is_loss(error) or has_lost_samples(error):
            raise LostActor(str(error), with_samples=has_lost_samples(error)) from error
        return status
    words = run_summary(
        result,
        first=first,
        folder=directory.path,
        report=directory.report,
        wall_s=round(display.wall_s, 3),
        held_out=config.evaluation.held_out,
    )
    keys = dict(flattened(config.model_dump(mode="json")))
    # Those that a setting would change: the longest part alone is in the status and on the page.
    causes = [finding for finding in run_findings(directory, keys) if finding.key]
    options.output.result("\n".join([words, *finding_lines(causes)]))
    return EXIT_STOPPED if result.stopped else 0


def _report_failure(error: BaseException, directory: RunDirectory, output: Output) -> int:
    newest = None
    with contextlib.suppress(OSError):
        newest = next(reversed(checkpoint.complete(directory.checkpoints)), None)
    output.result(failure_text(error, directory.path, newest))
    return EXIT_STOPPED if isinstance(error, Interrupted) else EXIT_FAILED
