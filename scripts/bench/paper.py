"""Measures the steps of FlexMARL's scenarios in each way of training, in virtual time, beside the paper's.

``flexmarl simulate`` plays a scenario in each of its modes (``launch/simulate/baselines.py``): the same actors,
workload, engines and devices. For each scenario the keys are the modes, and of each:

    step_s      seconds of a step, the mean of its steps
    ratio       to ``flexmarl-paper``, the paper's own system
    paper_s     the paper's seconds (arXiv 2602.09578); null if it has no such figure
    paper_ratio the ratio of these
    ...         all other figures of ``flexmarl simulate --json``

A result depends on the seed alone. A round has a seed of its own; ``step_s`` is the mean of all rounds. Also:
``versions``, ``settings``. ``PAPER.md`` in this folder discusses them.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from flexmarl.launch.bench import machine
from flexmarl.launch.bench.command import common_options, run_benchmark
from flexmarl.launch.bench.measure import Report, rounded
from flexmarl.launch.hosts import env
from flexmarl.launch.simulate.baselines import BASELINES, in_mode
from flexmarl.launch.simulate.scenario import Scenario, read_scenario, scenario_file
from flexmarl.launch.simulate.scenario_run import run_scenario

PAPER_S: Final[Mapping[str, Mapping[str, float]]] = MappingProxyType({
    "merchant-assistant": {
        "mas-rl": 914.4, "marti": 174.1, "flexmarl-paper": 126.1, "without-balancing": 152.2, "without-pipeline": 256.2,
    },
    "category-assistant": {
        "mas-rl": 438.6, "marti": 112.8, "flexmarl-paper": 78.8, "without-balancing": 95.9, "without-pipeline": 124.1,
    },
})  # fmt: skip
"""Seconds of a step, by scenario and mode."""
_REFERENCE: Final = "flexmarl-paper"


@dataclass(frozen=True, slots=True)
class Options:
    """``scenarios``: built-in names or files. ``rounds``: seeds, from ``seed`` on. ``overrides``: of the scenarios."""

    scenarios: tuple[str, ...] = tuple(PAPER_S)
    rounds: int = 1
    seed: int = 2048
    overrides: tuple[str, ...] = ()

    def scenario(self, name: str, seed: int, mode: str) -> Scenario:
        """Raises ConfigError for wrong overrides, and a mode that the scenario can't have."""
        return in_mode(read_scenario(scenario_file(name), (*self.overrides, f"seed={seed}")), mode)

    def seeds(self) -> Iterator[int]:
        """Those of the rounds."""
        yield from range(self.seed, self.seed + self.rounds)


def parts(options: Options) -> int:
    """The number of calls of ``report`` that ``measure`` makes."""
    return len(options.scenarios) * len(BASELINES) * options.rounds


def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured. It
    starts event loops, so none may run in this thread."""
    result = {}
    for name in options.scenarios:
        modes = {mode: _measure_mode(options, name, mode, report) for mode in BASELINES}
        reference_s, paper_s = modes[_REFERENCE]["step_s"], PAPER_S.get(name, {})
        for mode, figures in modes.items():
            figures["ratio"] = rounded(figures["step_s"] / reference_s)
            figures["paper_s"] = paper_s.get(mode)
            figures["paper_ratio"] = rounded(paper_s[mode] / paper_s[_REFERENCE]) if mode in paper_s else None
        result[name] = modes
    return {**result, "versions": machine.versions(), "settings": asdict(options)}


def _measure_mode(options: Options, name: str, mode: str, report: Report) -> dict[str, Any]:
    rounds: list[dict[str, float]] = []
    for seed in options.seeds():
        report(f"{name}, {mode}, seed {seed}")
        with tempfile.TemporaryDirectory(prefix="flexmarl-", dir=env.runtime_base()) as folder:
            scenario = options.scenario(name, seed, mode)
            summary = asdict(run_scenario(scenario, Path(folder) / "run", records_spans=False))
        figures = summary | summary.pop("transfers")
        rounds.append({key: figure for key, figure in figures.items() if isinstance(figure, int | float)})
    return {key: rounded(fmean(figures[key] for figures in rounds)) for key in rounds[0]}


def tables(console: Console, result: Mapping[str, Any]) -> None:
    for name in result["settings"]["scenarios"]:
        table = Table(title=name)
        table.add_column("mode")
        for column in ("step, s", "ratio", "paper's s", "ratio", "tokens/s"):
            table.add_column(column, justify="right")
        for mode, figures in result[name].items():
            keys = ("step_s", "ratio", "paper_s", "paper_ratio", "tokens_per_s")
            table.add_row(mode, *_cells([figures[key] for key in keys]))
        console.print(table)


def _cells(figures: Sequence[float | None]) -> Iterator[str]:
    for figure in figures:
        yield "-" if figure is None else f"{figure:.2f}" if figure < 10 else f"{figure:.1f}"


@click.command()
@click.argument("overrides", nargs=-1, metavar="[KEY.KEY=VALUE]...")
@click.option(
    "--scenario",
    "scenarios",
    multiple=True,
    help=f"Name or file of a scenario. Default: {', '.join(PAPER_S)}.",
)
@click.option("--seed", type=click.IntRange(0), default=2048, show_default=True, help="The first seed.")
@common_options(rounds=1, quick_time="ten minutes")
def paper(
    overrides: tuple[str, ...],
    scenarios: tuple[str, ...],
    as_json: bool,
    rounds: int | None,
    seed: int,
    quick: bool,
) -> int:
    """Measure the paper's scenarios in each way of training, in virtual time: seconds of a step and their ratios,
    beside the paper's.

    Each round has a seed of its own; the figures depend on nothing else. A scenario in all modes takes some minutes.

    \b
    Examples:
      scripts/bench/run paper
      scripts/bench/run paper --json > paper.json
      scripts/bench/run paper --scenario category-assistant --rounds 3

    Progress is on standard error; ctrl-C stops it.
    """
    options = Options(
        scenarios=scenarios or tuple(PAPER_S),
        rounds=rounds or 1,
        seed=seed,
        overrides=(*overrides, *(["training.steps=2"] if quick else [])),
    )
    for name in options.scenarios:  # raises for wrong overrides before anything starts
        options.scenario(name, seed, "flexmarl")
    return run_benchmark(partial(measure, options), parts(options), tables, as_json)
