"""The tables of ``PAPER.md`` from results. A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. All
other text of the page is written by hand.

    modes SCENARIO   each way of training beside the paper's
    ablations        ours without one of its parts
    parts            parts of a step
    gangs            the paper's system with fixed gangs of other sizes
    fleets           the paper's three fleets
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Final

from flexmarl.launch.simulate.baselines import BASELINES

from .paper_cases import FIRST_SEED, FLEET_MODES, FLEETS, GANGS, PAPER_S, REFERENCE, Case
from .paper_results import Row

PAGE: Final = Path(__file__).parent / "PAPER.md"
OURS: Final = "flexmarl"
_TABLE: Final = re.compile(r"(<!-- table: (\S+)(?: (\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)
_NONE: Final = "–"
_OTHER_CODE: Final = " \\*"
"""Behind a mode that earlier code has played."""
_ABLATIONS: Final = MappingProxyType({
    "without-balancing": "balancing", "without-pipeline": "the pipeline", "without-sharing": "sharing",
})  # fmt: skip
_PARTS: Final = MappingProxyType({
    "rollout_alone_s": "rollouts, nothing is trained",
    "overlap_s": "rollouts and training",
    "training_alone_s": "training after the rollouts",
    "swaps_exposed_s": "waits for states",
    "weights_exposed_s": "waits for weights",
})  # fmt: skip
_SHARES: Final = MappingProxyType({
    "training_busy": "slots that compute", "instances_busy": "instances that generate",
})  # fmt: skip
_FLEET_WORDS: Final = dict(zip(FLEETS, ("5 x 32B", "3 x 32B + 7 x 14B", "15 x 14B"), strict=True))
_PARTED_MODES: Final = (OURS, "without-sharing", REFERENCE)


class Figures:
    """Those of all rows, by case."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = list(rows)
        self._figures = {row.case: row.figures for row in self._rows}

    def of_seed(self, seed: int) -> "Figures":
        """Those of one seed alone."""
        return Figures(row for row in self._rows if row.case.seed == seed)

    def is_of_other_code(self, scenario: str, mode: str) -> bool:
        """True if other code than that of ``flexmarl`` has played a mode of the scenario."""
        codes = {OURS: set[str](), mode: set[str]()}
        for row in self._rows:
            if row.case.scenario == scenario and row.case.mode in codes:
                codes[row.case.mode].add(row.code)
        return bool(codes[OURS]) and codes[mode] != codes[OURS]

    def seeds(self, scenario: str, mode: str, overrides: tuple[str, ...] = ()) -> list[int]:
        """All that were played."""
        return sorted(
            case.seed
            for case in self._figures
            if (case.scenario, case.mode, case.overrides) == (scenario, mode, overrides)
        )

    def values(self, scenario: str, mode: str, key: str, overrides: tuple[str, ...] = ()) -> list[float]:
        """A figure, by seed."""
        return [
            self._figures[Case(scenario, mode, seed, overrides)][key]
            for seed in self.seeds(scenario, mode, overrides)
        ]

    def ratios(
        self, scenario: str, mode: str, reference: str, overrides: tuple[str, ...] = ()
    ) -> list[float]:
        """Seconds of a step to those of the mode ``reference``, by seed that both were played with."""
        both = set(self.seeds(scenario, mode, overrides)) & set(self.seeds(scenario, reference))
        return [
            self._figures[Case(scenario, mode, seed, overrides)]["step_s"]
            / self._figures[Case(scenario, reference, seed)]["step_s"]
            for seed in sorted(both)
        ]


def write_tables(rows: Sequence[Row], page: Path = PAGE) -> None:
    """Writes the tables of ``page`` again."""
    page.write_text(with_tables(page.read_text(), rows))


def with_tables(text: str, rows: Sequence[Row]) -> str:
    """The page with the tables of ``rows``. Raises KeyError for a table that is unknown."""
    figures = Figures(rows)

    def table(match: re.Match[str]) -> str:
        begin, name, argument, end = match.groups()
        lines = _TABLES[name](figures, argument or "")
        return "".join([begin, *(f"| {' | '.join(line)} |\n" for line in lines), end])

    return _TABLE.sub(table, text)


def _modes(figures: Figures, scenario: str) -> list[list[str]]:
    head = ["mode", "simulated s", "other seeds", "ratio", "tokens/s", "paper's s", "ratio"]
    lines, paper_s, first = {}, PAPER_S[scenario], figures.of_seed(FIRST_SEED)
    for mode in BASELINES:
        if not (seconds := first.values(scenario, mode, "step_s")):
            continue
        seconds_of_seeds = [f"{value:.1f}" for value in figures.values(scenario, mode, "step_s")[1:]]
        paper = (
            [f"{paper_s[mode]}", _ratio([paper_s[mode] / paper_s[REFERENCE]])]
            if mode in paper_s
            else [_NONE] * 2
        )
        lines[mode] = [
            f"`{mode}`{_OTHER_CODE * figures.is_of_other_code(scenario, mode)}",
            f"{seconds[0]:.1f}",
            ", ".join(seconds_of_seeds) or _NONE,
            _ratio(first.ratios(scenario, mode, REFERENCE)),
            _mean(first.values(scenario, mode, "tokens_per_s"), "{:.0f}"),
            *paper,
        ]
    slowest_first = sorted(lines, key=lambda mode: -first.values(scenario, mode, "step_s")[0])
    return [head, _rule(head), *(lines[mode] for mode in slowest_first)]


def _ablations(figures: Figures, _: str) -> list[list[str]]:
    head = ["without", "merchant assistant", "category assistant", "paper's"]
    lines = [
        [
            words,
            *(_ratio_spread(figures.ratios(scenario, mode, OURS)) for scenario in PAPER_S),
            _paper_ratios(mode),
        ]
        for mode, words in _ABLATIONS.items()
    ]
    against = [_ratio_spread(figures.ratios(scenario, REFERENCE, OURS)) for scenario in PAPER_S]
    return [head, _rule(head), *lines, [f"all of ours (`{REFERENCE}`)", *against, _NONE]]


def _paper_ratios(mode: str) -> str:
    ratios = [paper_s[mode] / paper_s[REFERENCE] for paper_s in PAPER_S.values() if mode in paper_s]
    return " and ".join(f"{ratio:.2f}" for ratio in ratios) or _NONE


def _parts(figures: Figures, scenario: str) -> list[list[str]]:
    head = ["seconds of a step", *(f"`{mode}`" for mode in _PARTED_MODES)]
    first = figures.of_seed(FIRST_SEED)
    seconds = [
        [words, *(_mean(first.values(scenario, mode, key), "{:.1f}") for mode in _PARTED_MODES)]
        for key, words in _PARTS.items()
    ]
    shares = [
        [words, *(_mean(first.values(scenario, mode, key), "{:.0%}") for mode in _PARTED_MODES)]
        for key, words in _SHARES.items()
    ]
    return [head, _rule(head), *seconds, *shares]


def _gangs(figures: Figures, scenario: str) -> list[list[str]]:
    head = ["ranks", f"`{REFERENCE}`, s", "ratio to `flexmarl`"]
    # Of the first seed alone: the others were not played with these sizes.
    lines, first = [], figures.of_seed(FIRST_SEED)
    for ranks, overrides in GANGS[scenario].items():
        seconds = first.values(scenario, REFERENCE, "step_s", overrides)
        ratios = first.ratios(scenario, REFERENCE, OURS, overrides)
        lines.append([ranks, _mean(seconds, "{:.1f}"), _ratio(ratios)])
    return [head, _rule(head), *lines]


def _fleets(figures: Figures, _: str) -> list[list[str]]:
    head = ["fleet", *(f"`{mode}`, s" for mode in FLEET_MODES), f"`{REFERENCE}` to `{OURS}`"]
    return [
        head,
        _rule(head),
        *(
            [
                _FLEET_WORDS[fleet],
                *(_mean(figures.values(fleet, mode, "step_s"), "{:.1f}") for mode in FLEET_MODES),
                _ratio(figures.ratios(fleet, REFERENCE, OURS)),
            ]
            for fleet in FLEETS
        ),
    ]


_TABLES: Final[Mapping[str, Callable[[Figures, str], list[list[str]]]]] = MappingProxyType({
    "modes": _modes, "ablations": _ablations, "parts": _parts, "gangs": _gangs, "fleets": _fleets,
})  # fmt: skip


def _rule(head: Sequence[str]) -> list[str]:
    return ["---"] * len(head)


def _mean(values: Sequence[float], form: str) -> str:
    return form.format(fmean(values)) if values else _NONE


def _ratio(ratios: Sequence[float]) -> str:
    return _mean(ratios, "{:.2f}")


def _ratio_spread(ratios: Sequence[float]) -> str:
    if len(ratios) < 2:
        return _ratio(ratios)
    return f"{_ratio(ratios)} ({min(ratios):.2f} to {max(ratios):.2f})"
