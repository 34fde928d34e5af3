"""The page of custom losses: its table, and whole runs with a function of the recipe's."""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.trainer.objective.loss_inputs import LossInputs

from ..test_docs import blocks, tables
from .conftest import TINY
from .in_process import Finished, RunsHere

SETTINGS = (
    "training.updates=2", "training.queries_per_step=4", "training.steps=4", "agent_defaults.optimizer.lr=0.01",
    "agent_defaults.algorithm.name=dapo", "deterministic=true",
)  # fmt: skip
LEARNED = ("loss", "grad_norm")
CLIPPED = """

def clipped(inputs):
    ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
    bounded = ratio.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    return -torch.minimum(ratio * inputs.advantages, bounded * inputs.advantages)


def breaks(inputs):
    return inputs.logprobs.sum()
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe with the losses of the page, and the one of its algorithm."""
    folder = tmp_path_factory.mktemp("recipe") / "tiny"
    shutil.copytree(TINY, folder)
    (block,) = (block for block in blocks("custom-losses.md") if block.file == "my-recipe/losses.py")
    (folder / "losses.py").write_text(block.text + CLIPPED)
    return folder


def learned(run: Finished) -> list[dict[str, Any]]:
    """By step, the figures of the policies that depend on their training."""
    assert run.status == 0 and not run.problems, run.text
    return [
        {key: value for key, value in line.items() if key.partition("/")[0] in LEARNED}
        for line in run.metrics
    ]


@pytest.fixture(scope="module")
def dual(runs_here: RunsHere, recipe: Path) -> list[dict[str, Any]]:
    loss = "agent_defaults.algorithm.loss=losses.py:dual_clip"
    return learned(runs_here.train("dual", *SETTINGS, loss, recipe=recipe))


def test_the_formula_of_an_algorithm_learns_what_the_algorithm_does(
    runs_here: RunsHere, recipe: Path
) -> None:
    loss = "agent_defaults.algorithm.loss=losses.py:clipped"
    run = runs_here.train("clipped", *SETTINGS, loss, recipe=recipe)
    expected = learned(runs_here.train("built-in", *SETTINGS, recipe=recipe))
    assert max(line.get("old_ratio_deviation/solver", 0.0) for line in run.metrics) > 1e-3
    for step, other in zip(learned(run), expected, strict=True):
        assert step == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_a_policy_that_is_suspended_computes_it_again_elsewhere(
    runs_here: RunsHere, recipe: Path, dual: list[dict[str, Any]]
) -> None:
    """Two policies are on one slot: the samples of the second update travel with the state."""
    loss = "agent_defaults.algorithm.loss=losses.py:dual_clip"
    shared = runs_here.train("shared", *SETTINGS, loss, "pool={name: shared, slots: 1}", recipe=recipe)
    for step, other in zip(learned(shared), dual, strict=True):
        assert step == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert sum(line.get("suspensions/solver", 0) for line in shared.metrics) > 0


def test_a_mistake_in_training_ends_the_run_with_its_sentence(runs_here: RunsHere, recipe: Path) -> None:
    run = runs_here.train(
        "broken", *SETTINGS, "agent_defaults.algorithm.loss=losses.py:breaks", recipe=recipe
    )
    assert run.status == 1
    assert "loss losses.py:breaks returns a tensor [], not one loss for each of" in run.text


def test_the_table_has_every_field_of_the_inputs() -> None:
    _header, *rows = tables("custom-losses.md")
    written = [name for _, cells in rows for name in re.findall(r"`(\w+)`", cells[0])]
    assert written == [field.name for field in dataclasses.fields(LossInputs)]
