"""The cost of the sharing between runs: CPU time and bytes of a group, for the run that shares and the one that trains.

A group has 8 trajectories of two turns, with prompts of 32 tokens and answers of ``tokens`` tokens, as the recipe
sort-digits has them. The file of trajectories, its reader, the message and the tokenizers are those of a run; nothing
else runs. A character is a token here. The keys, in CPU time, each for short and for long answers:

    read_ms      the run that shares: reads a group from its file, and makes text of it
    pack_ms      and packs it as a message of ``kib``
    tokens_ms    the run that trains: checks the text, and makes tokens of it by its own tokenizer
    rounds       every round's

Also: ``versions``, ``settings``. Each is the mean over ``groups`` groups.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from flexmarl.actors.messages import Query
from flexmarl.actors.recorded_trajectory import (
    RecordedTrajectory,
    RecordedTurn,
    compress_record,
    pack_record,
)
from flexmarl.core.protocol.codec import Encoder
from flexmarl.launch.bench.measure import Report, rounded
from flexmarl.launch.bench.results import result_of
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.run.logged_lines import LogReader
from flexmarl.launch.run_folder.samples.sample_file import SampleFile
from flexmarl.launch.sharing.shared_group import SharedGroup, read_groups

_AGENTS: Final = ("sorter", "checker")
_PROMPT: Final = 32
_LONGEST: Final = 4096
_FILE_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Options:
    """``tokens``: of a short and of a long answer."""

    rounds: int = 3
    groups: int = 200
    trajectories: int = 8
    tokens: tuple[int, int] = (32, 1024)


def record(options: Options, tokens: int, number: int) -> bytes:
    """The record of a group."""
    random = Random(f"{number} of {tokens}")
    trajectories = []
    for place in range(options.trajectories):
        turns = list[RecordedTurn]()
        for agent in _AGENTS:
            answer = tuple(random.randrange(10) for _ in range(tokens))
            prompt = "".join(random.choices("0123456789", k=_PROMPT - 1)) + "="
            logprobs = tuple(-random.random() for _ in answer)
            text = "".join(map(str, answer))
            turns.append(
                RecordedTurn(len(turns), agent, (prompt,), text, _PROMPT, answer, logprobs, 7, "length")
            )
        rewards = dict.fromkeys(_AGENTS, float(place % 2))
        trajectories.append(
            RecordedTrajectory(3, False, Query(f"q{number}", ""), place, rewards, turns=tuple(turns))
        )
    return compress_record(pack_record(trajectories))


def played(options: Options, tokens: int) -> dict[str, float]:
    """CPU milliseconds and KiB of a group."""
    with tempfile.TemporaryDirectory(prefix="sharing") as folder:
        path = Path(folder, "samples.sqlite")
        file = SampleFile(path, 50, _FILE_BYTES)
        file.add([record(options, tokens, number) for number in range(options.groups)])
        began = time.process_time()
        groups = _all_groups(path)
        read_s = time.process_time() - began
        file.close()
    assert len(groups) == options.groups
    encoder = Encoder()
    began = time.process_time()
    packed = [len(encoder.pack(group)) for group in groups]
    pack_s = time.process_time() - began
    reader = _reader(tokens)
    named = [[line | {"query": group.name("peer")} for line in group.lines] for group in groups]
    reader.groups(named[0])  # loads the tokenizer
    began = time.process_time()
    for lines in named:
        reader.groups(lines)
    tokens_s = time.process_time() - began
    seconds = {"read_ms": read_s, "pack_ms": pack_s, "tokens_ms": tokens_s}
    return {name: value / options.groups * 1e3 for name, value in seconds.items()} | {
        "kib": fmean(packed) / 1024
    }


def _all_groups(path: Path) -> list[SharedGroup]:
    """As a run reads them for a peer: so many at a time."""
    after, groups = 0, list[SharedGroup]()
    while True:
        number, more = read_groups(path, after, _AGENTS)
        if number == after:
            return groups
        after = number
        groups += more


def _reader(tokens: int) -> LogReader:
    settings = (
        "mode=async", "max_staleness=2", "agent_defaults.algorithm.correction=decoupled",
        f"agent_defaults.model.config.max_position_embeddings={_LONGEST}",
        f"agent_defaults.sampling.max_new_tokens={tokens}",
    )  # fmt: skip
    return LogReader(resolve("sort-digits", settings), needs_origin=False)


def of_rounds(seed: int, rounds: int, *, quick: bool) -> Callable[[Report], dict[str, Any]]:
    """The measurement of ``rounds`` rounds, which are all of the same groups. ``quick``: of fewer groups."""
    return partial(measure, Options(rounds, groups=5 if quick else 200))


def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured."""
    rounds = []
    for number in range(options.rounds):
        report(f"round {number}")
        line: dict[str, float] = {}
        for size, tokens in zip(("short", "long"), options.tokens, strict=True):
            line |= {f"{size}_{key}": rounded(value) for key, value in played(options, tokens).items()}
        rounds.append(line)
    means = {key: fmean(line[key] for line in rounds) for key in rounds[0]}
    return result_of(options, means, rounds=rounds)


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Prints the result as a table."""
    table = Table("answers", "read", "pack", "tokens", "KiB", title="CPU milliseconds of a shared group")
    for size, tokens in zip(("short", "long"), result["settings"]["tokens"], strict=True):
        keys = ("read_ms", "pack_ms", "tokens_ms", "kib")
        table.add_row(f"{tokens} tokens", *(f"{result[f'{size}_{key}']:g}" for key in keys))
    console.print(table)
