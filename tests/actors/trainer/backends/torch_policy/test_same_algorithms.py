"""Names of algorithms that are one and the same under a setting: the table of the algorithms' page."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import Tensor

import flexmarl.launch
from flexmarl.actors.credit.algorithms import ALGORITHMS

from ...algorithm import algorithm
from .paper_steps import first_logprobs, make_policy, make_turns, samples_of, stepped_updates, train

PAGE: Final = Path(flexmarl.launch.__path__[0], "docs", "algorithms.md")
SIZES: Final = (3, 4, 5, 3)


@dataclass(frozen=True)
class Setting:
    """``turns``: of an agent in a trajectory, at most. ``is_stale``: the engine's policy is another one."""

    words: str
    updates: int = 1
    turns: int = 1
    is_stale: bool = False
    old_policy: str = "proximal"


SETTINGS: Final = (
    Setting("`strict`, `sync`; one turn an agent"),
    Setting("`strict`, `sync`; several turns", turns=3),
    Setting("the same, `updates: 2` or more; one turn", updates=2),
    Setting("the same, `updates: 2` or more; several turns", updates=2, turns=3),
    Setting("`async`; one turn", is_stale=True),
    Setting("`async`; several turns", turns=3, is_stale=True),
    Setting("`async`, `old_policy: behaviour`; one turn", is_stale=True, old_policy="behaviour"),
    Setting(
        "`async`, `old_policy: behaviour`; several turns", turns=3, is_stale=True, old_policy="behaviour"
    ),
)


def gradients(name: str, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Those of the policy, of all updates of one step."""
    of = algorithm(name=name, old_policy=setting.old_policy)
    policy = make_policy(of, updates=setting.updates)
    turns, rewards = make_turns(5, SIZES)
    rng = random.Random(7)
    drawn = []
    for turn in turns:
        if turn.number < setting.turns:
            engine = first_logprobs(turn).tolist()
            if setting.is_stale:
                engine = [logprob + rng.uniform(-0.9, 0.9) for logprob in engine]
            drawn.append(replace(turn, engine=tuple(engine)))
    train(policy, samples_of(drawn, rewards, of), 1)
    updates, _ = stepped_updates(policy, monkeypatch)
    return torch.cat([update.gradients[0] for update in updates])


def equal_names(found: Mapping[str, Tensor]) -> list[list[str]]:
    """The names with the same gradients, two and more each."""
    families: list[list[str]] = []
    for name, gradient in found.items():
        for family in families:
            other = found[family[0]]
            if float((gradient - other).norm()) < 1e-5 * float(other.norm()):
                family.append(name)
                break
        else:
            families.append([name])
    return [family for family in families if len(family) > 1]


def has_ratio(name: str, setting: Setting) -> bool:
    """False if the setting is refused for the algorithm."""
    is_plain = setting.updates == 1 and setting.old_policy == "proximal"
    return is_plain or ALGORITHMS[name].has_ratio


def row_of(setting: Setting, families: list[list[str]]) -> str:
    cell = "; ".join(" = ".join(f"`{name}`" for name in family) for family in families)
    return f"| {setting.words} | {cell or 'none'} |"


def table_of_page() -> list[str]:
    _, _, below = PAGE.read_text().partition("### Names that are the same\n")
    return [line for line in below.partition("\n#")[0].splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.words)
def test_the_page_names_the_algorithms_that_are_the_same(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Options may give two losses the same gradient by chance: on these samples no bound may lie between theirs.
    names = [name for name, row in ALGORITHMS.items() if not row.options and has_ratio(name, setting)]
    found = {name: gradients(name, setting, monkeypatch) for name in names}
    row = row_of(setting, equal_names(found))
    assert row in table_of_page()


def test_the_page_has_no_other_row() -> None:
    assert [row.split("|")[1].strip() for row in table_of_page()] == [setting.words for setting in SETTINGS]
