"""Measures the embedded engine beside ``model.generate`` and, if it is installed, vLLM.

64 requests with prompts and answers of uneven lengths arrive at random. All contenders have the same model (two
layers, random weights, float32, one thread) and get the same requests in each round; they take turns, each in a process
of its own. The keys of the result, medians of the rounds:

    embedded_tokens_per_s, generate_tokens_per_s, vllm_tokens_per_s    generated tokens; None: vLLM is not installed
    step_ms, gap_ms, gap_in_one_piece_ms    time between two tokens of running turns: the median, and the longest while
                         a prompt of maximum length arrives, which is computed in chunks or at once
    update_pause_s, update_transfer_s, update_load_s    new weights of 100 MB from another process: from the last token
                         of the interrupted requests until the engine takes others, and the parts of it
    copy_s               a copy of as many bytes in the engine's process
    rounds, goals, contenders, machine, settings
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.process_node import ProcessNode
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem
from flexmarl.launch.bench import machine
from flexmarl.launch.bench.command import common_options, run_benchmark
from flexmarl.launch.bench.goals import Goal
from flexmarl.launch.bench.measure import rounded
from flexmarl.launch.bench.result_tables import goals_table, warn_if_busy
from flexmarl.launch.bench.results import result_of
from flexmarl.launch.hosts import env
from flexmarl.launch.monitoring.formatting import compact

from .rollout_contenders import CONTENDERS, Contender, Embedded, Vllm
from .rollout_update import UpdatedEngine, WeightSource

_CALL_TIMEOUT_S = 600.0
_MODULES = ("flexmarl.actors.inference.engines.embedded.huggingface",)
"""With the large libraries that all contenders need: imported once for all processes."""

GOALS = (
    Goal(
        "embedded_tokens_per_s", "embedded, tokens/s", 2.0, at_most=False,
        bare="generate_tokens_per_s", bare_words="generate",
    ),
    Goal(
        "embedded_tokens_per_s", "embedded, tokens/s", 1.0, at_most=False,
        bare="vllm_tokens_per_s", bare_words="vLLM",
    ),
    Goal("update_pause_s", "100 MB of new weights, pause, s", 1.5, at_most=True, bare="copy_s", bare_words="copy"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """``requests``: of one round. ``layers``: of the model whose weights are replaced, 12.6 MB each."""

    rounds: int = 5
    requests: int = 64
    layers: int = 8
    vllm: bool = True


def parts(options: Options) -> int:
    return 2 * options.rounds


def contender_names(options: Options) -> list[str]:
    """Those that take part: vLLM, if it is wanted and installed."""
    return [name for name in CONTENDERS if name != "vllm" or (options.vllm and Vllm.is_installed())]


async def measure(options: Options, report: Callable[[str], None]) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    described = await machine.describe()
    names = contender_names(options)
    env.use_vllm_in_one_process()
    with TemporaryDirectory(prefix="flexmarl-", dir=env.runtime_base()) as folder:
        async with (
            ActorSystem("bench", Path(folder)) as system,
            Supervisor(
                system, ProcessNode(system, Path(folder), Path(folder), None, modules=_MODULES)
            ) as supervisor,
        ):
            served, versions = await _served(supervisor, folder, names, options, report)
            updated = await _updated(supervisor, folder, options, report)
    rounds = [{**one, **other} for one, other in zip(served, updated, strict=True)]
    figures = {key: statistics.median(round_[key] for round_ in rounds) for key in rounds[0]}
    result = result_of(
        options,
        figures,
        _goals(figures),
        described,
        rounds={key: [rounded(round_[key]) for round_ in rounds] for key in figures},
        contenders=versions,
    )
    return {"vllm_tokens_per_s": None, **result}


def tables(console: Console, result: Mapping[str, Any]) -> None:
    console.print(goals_table(", ".join(result["contenders"].values()), result["goals"], "beside"))
    gap, whole, step = (compact(result[key]) for key in ("gap_ms", "gap_in_one_piece_ms", "step_ms"))
    words = f"at most {gap} ms between two tokens of running turns, {whole} without chunks; {step} as a rule"
    console.print(Text(f"while the longest prompt arrives: {words}"))
    warn_if_busy(console, result)


def _goals(figures: dict[str, float]) -> list[Goal]:
    return [goal for goal in GOALS if goal.bare in figures]


async def _served(
    supervisor: Supervisor, folder: str, names: list[str], options: Options, report: Callable[[str], None]
) -> tuple[list[dict[str, float]], dict[str, str]]:
    """The figures of each round, and the versions of the contenders."""
    actors: dict[str, ActorRef[Contender]] = {}
    versions: dict[str, str] = {}
    for name in names:
        actor = await supervisor.spawn(CONTENDERS[name], name, {"folder": f"{folder}/{name}"})
        actors[name] = actor
        versions[name] = await actor.within(_CALL_TIMEOUT_S).prepare()
        await actor.within(_CALL_TIMEOUT_S).serve(options.requests, 0)  # warm
    rounds = []
    for number in range(1, options.rounds + 1):
        report(f"engines, round {number} of {options.rounds}")
        figures = {}
        for name, actor in actors.items():
            served = await actor.within(_CALL_TIMEOUT_S).serve(options.requests, number)
            figures[f"{name}_tokens_per_s"] = served
        embedded: ActorRef[Embedded] = actors["embedded"]  # type: ignore[assignment]  # made from this class
        gaps, whole = [
            await embedded.within(_CALL_TIMEOUT_S).gaps(number, in_chunks) for in_chunks in (True, False)
        ]
        figures |= {"step_ms": 1000 * statistics.median(gaps), "gap_ms": 1000 * max(gaps)}
        rounds.append({**figures, "gap_in_one_piece_ms": 1000 * max(whole)})
    return rounds, versions


async def _updated(
    supervisor: Supervisor, folder: str, options: Options, report: Callable[[str], None]
) -> list[dict[str, float]]:
    kwargs = {"runtime_dir": folder, "layers": options.layers}
    source = await supervisor.spawn(WeightSource, "source", kwargs)
    engine = await supervisor.spawn(UpdatedEngine, "engine", kwargs)
    rounds = []
    for version in range(1, options.rounds + 3):
        if version > 2:
            report(f"weights, round {version - 2} of {options.rounds}")
        handle = await source.within(_CALL_TIMEOUT_S).publish(version)
        update = await engine.within(_CALL_TIMEOUT_S).update(handle, 0.2)
        if version > 2:  # the two slots of the shared memory are mapped
            rounds.append(
                {
                    "update_pause_s": update.pause_s,
                    "update_transfer_s": update.transfer_s,
                    "update_load_s": update.load_s,
                    "copy_s": update.copy_s,
                }
            )
    return rounds


@click.command()
@click.option("--vllm/--no-vllm", default=True, show_default=True, help="Measure vLLM too, if installed.")
@common_options(rounds=5, quick_time="half a minute")
def rollout(as_json: bool, vllm: bool, rounds: int | None, quick: bool) -> int:
    """Measure the embedded engine: 64 requests of uneven length that arrive at random, beside model.generate and vLLM
    with the same tiny model; the pause by new weights of 100 MB beside a copy of as many bytes.

    \b
    Examples:
      scripts/bench/run rollout
      scripts/bench/run rollout --json > rollout.json
      scripts/bench/run rollout --quick --no-vllm

    Nothing else should be running on the machine. Progress is on standard error; ctrl-C stops it.
    """
    options = Options(rounds=rounds or (1 if quick else 5), vllm=vllm)
    return run_benchmark(partial(measure, options), parts(options), tables, as_json)
