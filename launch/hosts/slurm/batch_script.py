"""The batch script of a run. Pure."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ....actors.errors import ConfigError

_TIME: Final = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
_TIMES: Final = "minutes, minutes:seconds, hours:minutes:seconds, days-hours or days-hours:minutes[:seconds]"

_ARRAY: Final = re.compile(r"--array([= ].*)?|-a([= \d].*)?")
"""The forms of the option of a job array, which ``-account`` does not have."""

_NODES: Final = """
# `flexmarl node` on the other hosts. A host that is lost ends neither the others nor the job.
srun --nodes={other_nodes} --ntasks={other_nodes} --ntasks-per-node=1 --relative=1 \\
    --no-kill --kill-on-bad-exit=0 --cpu-bind=none \\
    {node} &
"""

_HEAD: Final = """
# The head of the run is here, on the first host. A job that is started again continues the run.
{head} &
head=$!

# Ahead of the time limit (USR1), and after scancel (TERM), the head stops with a checkpoint.
newest() {{ find "$run/checkpoints" -maxdepth 1 -name 'step_*[0-9]' 2>/dev/null | sort -V | tail -n 1; }}
before=$(newest)
signalled='' time_is_up=''
trap 'signalled=yes time_is_up=yes; kill -TERM "$head"' USR1
trap 'signalled=yes; kill -TERM "$head"' TERM
while true; do
    signalled=''
    wait "$head"
    status=$?
    [[ $signalled ]] || break # a signal has ended the wait, not the head
done

# The job is put into the queue again if it has come further: else it would be for ever.
if [[ $time_is_up && $status == {stopped} ]]; then
    if [[ $(newest) != "$before" ]]; then
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "flexmarl: the time limit came before a new checkpoint: not put into the queue again" >&2
    fi
fi
exit "$status"
"""


@dataclass(frozen=True, slots=True)
class Job:
    """``run``: the run's folder, absolute. ``words``: recipe and settings of ``flexmarl train``. ``command``: that of
    flexmarl. ``warn_s``: seconds from the signal to the time limit. ``more``: options of sbatch, each a word. ``time``,
    ``partition``: None for Slurm's default. ``stopped``: the head's exit status after a stop."""

    run: Path
    words: tuple[str, ...]
    command: tuple[str, ...]
    nodes: int
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    time: str | None = None
    partition: str | None = None
    warn_s: int = 120
    more: tuple[str, ...] = ()
    stopped: int = 130

    def __post_init__(self) -> None:
        """Raises ConfigError if ``time`` is invalid or too short."""
        if self.time is not None and seconds_of(self.time) <= self.warn_s:
            raise ConfigError(
                f"--time {self.time}: is not longer than the {self.warn_s} s for the last checkpoint (--warn-s)"
            )

    @property
    def file(self) -> Path:
        """The path of the batch script: beside the run's folder, which does not exist yet."""
        return self.run.with_name(f"{self.run.name}.sbatch")

    @property
    def output(self) -> Path:
        """The path that Slurm writes the output to; of an array, with Slurm's ``%a`` for the number of the task."""
        return self.run.with_name(f"{self.run.name}-%a.out" if self.is_array else f"{self.run.name}.out")

    @property
    def is_array(self) -> bool:
        """True for a job array: the name of each run of it ends with the number of its task."""
        return any(_ARRAY.fullmatch(option) for option in self.more)


def seconds_of(time: str) -> int:
    """A time limit in one of Slurm's forms. Raises ConfigError."""
    match = _TIME.fullmatch(time)
    if match is None:
        raise ConfigError(f"--time {time!r}: must be {_TIMES}")
    parts = [int(part) for part in match["parts"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return ((int(match["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(parts) < 3:
        minutes, seconds = (*parts, 0)[:2]
        return minutes * 60 + seconds
    hours, minutes, seconds = parts
    return (hours * 60 + minutes) * 60 + seconds


def script(job: Job) -> str:
    """The text of the batch script."""
    head = [
        *job.command,
        "train",
        *job.words,
        "--runs",
        str(job.run.parent),
        "--name",
        job.run.name,
        "--continue",
    ]
    node = shlex.join([*job.command, "node", "--join"])
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(job)), ""]
    task = '-"$SLURM_ARRAY_TASK_ID"' if job.is_array else ""
    lines += ["# Written by `flexmarl slurm`.", f"run={shlex.quote(str(job.run))}{task}", ""]
    text = "\n".join(lines)
    other_nodes = job.nodes - 1
    if other_nodes:
        head += ["--nodes", str(other_nodes)]
        text += _NODES.format(other_nodes=other_nodes, node=f'{node} "$run/address"')
    words = _fold(head)
    if job.is_array:
        words = words.replace(f"--name {shlex.quote(job.run.name)}", '--name "${run##*/}"', 1)
    return text + _HEAD.format(head=words, stopped=job.stopped)


def _options(job: Job) -> Iterator[str]:
    yield f"--job-name={shlex.quote(job.run.name)}"
    yield f"--nodes={job.nodes}"
    yield "--ntasks-per-node=1"
    if job.gpus_per_node is not None:
        yield f"--gpus-per-node={job.gpus_per_node}"
    yield "--exclusive" if job.cpus_per_node is None else f"--cpus-per-task={job.cpus_per_node}"
    if job.time is not None:
        yield f"--time={job.time}"
    if job.partition is not None:
        yield f"--partition={shlex.quote(job.partition)}"
    yield f"--signal=B:USR1@{job.warn_s}"
    yield "--requeue"
    yield "--no-kill"
    yield f"--output={shlex.quote(str(job.output))}"
    yield "--open-mode=append"
    yield from job.more


def _fold(words: Sequence[str]) -> str:
    return shlex.join(words).replace(" --runs ", " \\\n    --runs ", 1)
