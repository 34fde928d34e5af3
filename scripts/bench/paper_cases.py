"""The cases of ``PAPER.md``: scenario, mode and seed of each simulation, and the paper's seconds beside them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from flexmarl.launch.simulate.baselines import BASELINES

PAPER_S: Final[Mapping[str, Mapping[str, float]]] = MappingProxyType({
    "merchant-assistant": {
        "mas-rl": 914.4, "marti": 174.1, "flexmarl-paper": 126.1, "without-balancing": 152.2, "without-pipeline": 256.2,
    },
    "category-assistant": {
        "mas-rl": 438.6, "marti": 112.8, "flexmarl-paper": 78.8, "without-balancing": 95.9, "without-pipeline": 124.1,
    },
})  # fmt: skip
"""Seconds of a step (arXiv 2602.09578), by scenario and mode."""
REFERENCE: Final = "flexmarl-paper"
FLEETS: Final = ("fleet-5x32b", "fleet-3x32b-7x14b", "fleet-15x14b")
FLEET_MODES: Final = (REFERENCE, "without-sharing", "flexmarl")
CROWDED: Final = FLEETS[1:]
"""Their policies can't have slots of their own: a 14B would have 4 of them, and needs 5."""
FIRST_SEED: Final = 2048
"""The paper's."""
SEEDS: Final = tuple(range(FIRST_SEED, FIRST_SEED + 3))
ONE_SEED: Final = ("mas-rl", "distrl", "one-step-off")
"""Modes that are far from all others, or train other samples."""


def _category_ranks(small: int, large: int) -> tuple[str, ...]:
    ranks = {"planner": small, "attributes": small, "prices": small, "analyst": large, "writer": large}
    # Slots beyond the ranks of all would never be used, and are refused.
    slots = f"pool.slots={min(64, sum(ranks.values()))}"
    return (*(f"agents.{agent}.trainer.ranks={count}" for agent, count in ranks.items()), slots)


GANGS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = MappingProxyType({
    "merchant-assistant": {
        "16": (),
        "12": ("agent_defaults.trainer.ranks=12",),
        "8": ("agent_defaults.trainer.ranks=8",),
    },
    "category-assistant": {
        "16 and 16": (),
        "10 and 16": _category_ranks(10, 16),
        "8 and 12": _category_ranks(8, 12),
    },
})  # fmt: skip
"""Overrides for fixed gangs of other sizes, by scenario and their ranks: with 14B, and with 32B. With more than 16 a
rank has no sample of the paper's micro-batch; with the smallest all policies train at once."""


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """``overrides``: of the scenario, beside the seed."""

    scenario: str
    mode: str
    seed: int
    overrides: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """One line for people."""
        return ", ".join([self.scenario, self.mode, f"seed {self.seed}", *self.overrides])


def page_cases() -> tuple[Case, ...]:
    """All cases of the page, those first that decide most."""
    return (*_of_modes(), *_of_gangs(), *_of_fleets())


def _of_modes() -> Iterator[Case]:
    for seed in SEEDS:
        for scenario in PAPER_S:
            for mode in BASELINES:
                if seed == FIRST_SEED or mode not in ONE_SEED:
                    yield Case(scenario, mode, seed)


def _of_gangs() -> Iterator[Case]:
    for scenario, sizes in GANGS.items():
        for overrides in sizes.values():
            if overrides:  # else it is one of the modes
                yield Case(scenario, REFERENCE, FIRST_SEED, overrides)


def _of_fleets() -> Iterator[Case]:
    for scenario in FLEETS:
        for mode in FLEET_MODES:
            if scenario not in CROWDED or mode != "without-sharing":
                yield Case(scenario, mode, FIRST_SEED)
