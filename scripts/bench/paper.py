"""Measures the steps of FlexMARL's scenarios in each way of training, in virtual time, beside the paper's.

``flexmarl simulate`` plays a scenario in each of its modes (``launch/simulate/baselines.py``): the same actors,
workload, engines and devices. For each scenario the keys are the modes, and of each:

    step_s      seconds of a step, the mean of its steps
    ratio       to ``flexmarl-paper``, the paper's own system; null if that was not played
    paper_s     the paper's seconds (arXiv 2602.09578); null if it has no such figure
    paper_ratio the ratio of these
    ...         all other figures of ``flexmarl simulate --json``

A result depends on the code and the seed alone. A round has a seed of its own; the figures are means of all rounds.
Also: ``versions``, ``settings``.

With ``--page`` the cases are those of ``PAPER.md`` in this folder (``paper_cases.py``), and its tables are written.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.bench import machine
from flexmarl.launch.bench.command import common_options, run_benchmark
from flexmarl.launch.bench.measure import Report, rounded
from flexmarl.launch.hosts import env
from flexmarl.launch.simulate.baselines import BASELINES, in_mode
from flexmarl.launch.simulate.scenario import Scenario, read_scenario, scenario_file
from flexmarl.launch.simulate.scenario_run import run_scenario

from .paper_cases import FIRST_SEED, PAPER_S, REFERENCE, Case, page_cases
from .paper_page import PAGE, write_tables
from .paper_results import Results, Row

RESULTS: Final = PAGE.with_name("paper.jsonl")
"""The results of the page."""


@dataclass(frozen=True, slots=True)
class Options:
    """``scenarios``: built-in names or files; with ``modes`` and ``rounds``, whose seeds begin at ``seed``, the cases
    that are played. ``overrides``: of the scenarios. ``page``: of the page's cases, those that are such."""

    scenarios: tuple[str, ...] = tuple(PAPER_S)
    modes: tuple[str, ...] = tuple(BASELINES)
    rounds: int = 1
    seed: int = FIRST_SEED
    overrides: tuple[str, ...] = ()
    page: bool = False

    def cases(self) -> tuple[Case, ...]:
        """In the order in which they are played."""
        seeds = range(self.seed, self.seed + self.rounds)
        if self.page:
            return tuple(
                case
                for case in page_cases()
                if case.scenario in self.scenarios and case.mode in self.modes and case.seed in seeds
            )
        return tuple(
            Case(scenario, mode, seed, self.overrides)
            for scenario in self.scenarios
            for mode in self.modes
            for seed in seeds
        )


def scenario_of(case: Case) -> Scenario:
    """Raises ConfigError for wrong overrides, and a mode that the scenario can't have."""
    overrides = (*case.overrides, f"seed={case.seed}")
    return in_mode(read_scenario(scenario_file(case.scenario), overrides), case.mode)


def play(case: Case) -> dict[str, float]:
    """The figures of a case. It starts an event loop, so none may run in this thread."""
    with tempfile.TemporaryDirectory(prefix="flexmarl-", dir=env.runtime_base()) as folder:
        summary = asdict(run_scenario(scenario_of(case), Path(folder) / "run", records_spans=False))
    figures = summary | summary.pop("transfers")
    return {key: rounded(figure) for key, figure in figures.items() if isinstance(figure, int | float)}


def measure(options: Options, results: Results, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each case before it is played. Cases
    that ``results`` has are not played again."""
    rows = []
    for case in options.cases():
        report(case.words)
        rows.append(results.row(case) or results.add(case, play(case)))
    if options.page:
        write_tables(results.rows)
    return {**figures_by_mode(rows), "versions": machine.versions(), "settings": asdict(options)}


def figures_by_mode(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """The means over the seeds by scenario and mode; overrides are those of all rows, or none."""
    plain = [row for row in rows if row.case.overrides == rows[0].case.overrides]
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for scenario in dict.fromkeys(row.case.scenario for row in plain):
        of_scenario = [row for row in plain if row.case.scenario == scenario]
        modes = result[scenario] = {
            mode: _means([row.figures for row in of_scenario if row.case.mode == mode])
            for mode in dict.fromkeys(row.case.mode for row in of_scenario)
        }
        paper_s = PAPER_S.get(scenario, {})
        for mode, figures in modes.items():
            reference = modes.get(REFERENCE)
            figures["ratio"] = rounded(figures["step_s"] / reference["step_s"]) if reference else None
            figures["paper_s"] = paper_s.get(mode)
            figures["paper_ratio"] = rounded(paper_s[mode] / paper_s[REFERENCE]) if mode in paper_s else None
    return result


def _means(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    return {key: rounded(fmean(figures[key] for figures in rounds)) for key in rounds[0]}


def tables(console: Console, result: Mapping[str, Any]) -> None:
    for name in result["settings"]["scenarios"]:
        if name not in result:
            continue
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
    help=f"Name or file of a scenario. Default: {', '.join(PAPER_S)}; with --page all of its scenarios.",
)
@click.option("--mode", "modes", multiple=True, type=click.Choice([*BASELINES]), help="Default: all modes.")
@click.option("--seed", type=click.IntRange(0), default=FIRST_SEED, show_default=True, help="The first seed.")
@click.option(
    "--keep",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of the results. Those that it has from the same code are not played again.",
)
@click.option(
    "--page", is_flag=True, help="Play the cases of PAPER.md, which paper.jsonl keeps, and write its tables."
)
@common_options(rounds=1, quick_time="ten minutes")
def paper(
    overrides: tuple[str, ...],
    scenarios: tuple[str, ...],
    modes: tuple[str, ...],
    as_json: bool,
    rounds: int | None,
    seed: int,
    quick: bool,
    keep: Path | None,
    page: bool,
) -> int:
    """Measure the paper's scenarios in each way of training, in virtual time: seconds of a step and their ratios,
    beside the paper's.

    Each round has a seed of its own; the figures depend on nothing else. A case takes half a minute of one core.

    \b
    Examples:
      scripts/bench/run paper
      scripts/bench/run paper --json > paper.json
      scripts/bench/run paper --scenario category-assistant --mode marti --rounds 3 --keep results.jsonl
      scripts/bench/run paper --page

    Progress is on standard error; ctrl-C stops it. With --keep or --page the same command continues.
    """
    if page and (overrides or quick or keep):
        raise ConfigError("--page has cases of its own: leave out overrides, --quick and --keep")
    of_page = page_cases()
    options = Options(
        scenarios=scenarios or tuple(dict.fromkeys(case.scenario for case in of_page) if page else PAPER_S),
        modes=modes or tuple(BASELINES),
        rounds=rounds or (len({case.seed for case in of_page}) if page else 1),
        seed=seed,
        overrides=(*overrides, *(["training.steps=2"] if quick else [])),
        page=page,
    )
    cases = options.cases()
    if not cases:
        raise ConfigError(
            "--page has no case of these scenarios, modes and seeds: leave some of the options out"
        )
    for name in options.scenarios:  # raises for wrong overrides before anything starts
        scenario_of(Case(name, "flexmarl", seed, options.overrides))
    results = Results(RESULTS if page else keep)
    return run_benchmark(partial(measure, options, results), len(cases), tables, as_json)
