"""Makes the folder of a run of any length: that of a short simulated run, with its lines, trajectories and spans many
times over."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from flexmarl.actors.messages import Query
from flexmarl.actors.recorded_trajectory import (
    RecordedTrajectory,
    RecordedTurn,
    compress_record,
    pack_record,
)
from flexmarl.actors.spans import Span, record
from flexmarl.core.spans import SPAN_BYTES, SpanRecorder
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.run_folder.samples.sample_file import SampleFile
from flexmarl.launch.run_folder.spans.span_log import SpanLog
from flexmarl.launch.run_folder.spans.trace_config import TraceConfig

CLI: Final = "import sys; from flexmarl.launch.cli.main import main; sys.exit(main(sys.argv[1:]))"
WANTED_TEXT: Final = "a needle"
"""In the prompt of one query alone."""

_STEP_S: Final = 20.0
_GROUP: Final = 8
_TURNS: Final = 2
_KEPT_STEPS: Final = 50
_BATCH: Final = 10_000
_LANES: Final = 8
_START_S: Final = 300.0


def make_run(runs: Path, steps: int, samples: int, spans: int) -> Path:
    """The folder of a run of ``steps`` steps, the last of which have ``samples`` recorded turns together. Raises
    subprocess.CalledProcessError if the short run fails."""
    run([
        "train", "sort-digits", "--name", "large", "--runs", str(runs), "--quiet", "engine.name=simulated",
        "trainer.name=simulated", "training.steps=2", "data.eval_problems=9",
    ])  # fmt: skip
    directory = RunDirectory.existing(runs / "large")
    begin_s = _repeat_lines(directory, steps)
    _add_samples(directory, steps, samples)
    _add_spans(directory, steps, spans, begin_s)
    return directory.path


def run(arguments: Sequence[str]) -> None:
    """A command of flexmarl, to its end."""
    subprocess.run(
        [sys.executable, "-P", "-c", CLI, *arguments],
        check=True, timeout=_START_S, stdout=sys.stderr, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def _repeat_lines(directory: RunDirectory, steps: int) -> float:
    """Appends lines of further steps. Returns the time of the first event, in seconds since 1970."""
    line = json.loads(directory.metrics.read_text().splitlines()[-1])
    with directory.metrics.open("a") as file:
        for step in range(3, steps + 1):
            swing = 1.0 + 0.2 * math.sin(step / 40)
            later = {key: value * swing if isinstance(value, float) else value for key, value in line.items()}
            file.write(f"{json.dumps({**later, 'step': step, 'time_s': step * line['step_s']})}\n")
    first: dict[str, Any] = json.loads(directory.events.read_text().splitlines()[0])
    return float(first["time"])


def _add_samples(directory: RunDirectory, steps: int, samples: int) -> None:
    records = max(1, samples // (_GROUP * _TURNS))
    file = SampleFile(directory.samples, _KEPT_STEPS, 2**40)
    try:
        for first in range(0, records, 500):
            numbers = range(first, min(first + 500, records))
            file.add([_record(number, steps - number % min(steps, _KEPT_STEPS)) for number in numbers])
    finally:
        file.close()


def _record(number: int, step: int) -> bytes:
    query = Query(f"q{number:06}", WANTED_TEXT if number == 3 else f"sort the digits of {number}")

    def turn(place: int, reward: float) -> RecordedTurn:
        text = f"{number} {place} " * 20
        tokens = tuple(ord(character) for character in text)
        logprobs = tuple(-0.01 * (token % 50) for token in tokens)
        agent = ("sorter", "checker")[place % 2]
        return RecordedTurn(
            place, agent, (query.text,), text, 40, tokens, logprobs, step, "stop", reward, reward - 0.5
        )

    return compress_record(
        pack_record([
            RecordedTrajectory(
                step, False, query, trajectory, {"sorter": reward, "checker": reward},
                turns=tuple(turn(place, reward) for place in range(_TURNS)),
            )
            for trajectory in range(_GROUP)
            for reward in [(trajectory + number) % _GROUP / _GROUP]
        ])
    )  # fmt: skip


def _add_spans(directory: RunDirectory, steps: int, spans: int, begin_s: float) -> None:
    """Turns on lanes of workers and instances, one after another in each, with micro-batches and steps."""
    recorder = SpanRecorder(_no_time, _no_time, _BATCH * 4 * SPAN_BYTES)
    log = SpanLog(directory.trace, TraceConfig(limit_mib=100_000), print)
    received = 0
    span_s = steps * _STEP_S / max(1, spans // _LANES)
    try:
        for first in range(0, spans, _BATCH):
            for number in range(first, min(first + _BATCH, spans)):
                record(recorder, *_span(number, begin_s, span_s))
            batch = recorder.take(1.0, received)
            received = batch.number
            log.add("rollout-0", "host-0", batch)
    finally:
        log.close()


def _no_time() -> float:
    """A clock for spans whose times are seconds since 1970 already."""
    return 0.0


def _span(number: int, begin_s: float, span_s: float) -> Span:
    lane, place = number % _LANES, number // _LANES
    begin = begin_s + place * span_s
    step = int((begin - begin_s) / _STEP_S) + 1
    query, policy = f"q{place // 64:06}", ("sorter", "checker")[lane % 2]
    if lane < 4:
        span = Span(f"instance-{lane}", "generate", begin, begin + 0.9 * span_s, query, policy, policy)
        return span._replace(trajectory=place % 8, turn=lane % 2, step=step, version=step, tokens=64)
    if lane < 6:
        span = Span(f"rollout-{lane} turns", "turn", begin, begin + span_s, query, policy, policy)
        return span._replace(trajectory=place % 8, turn=lane % 2, step=step, version=step, tokens=64)
    kind = "optimizer" if place % 32 == 31 else "micro_batch"
    span = Span(f"slot-{lane}", kind, begin, begin + 0.8 * span_s, policy=policy)
    return span._replace(version=step, step=step, micro_batch=place)
