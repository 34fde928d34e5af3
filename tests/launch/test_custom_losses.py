"""The page of custom losses: its table, and whole runs with a function of the recipe's."""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.trainer.objective.loss_inputs import LossInputs

from ..pages import blocks, tables
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


def first_by_lengths(inputs):
    firsts = torch.zeros_like(inputs.advantages)
    firsts[inputs.lengths.cumsum(0) - inputs.lengths] = 0.5
    return firsts * clipped(inputs)


def first_by_columns(inputs):
    return inputs.columns["keep"] * inputs.columns["share"] * clipped(inputs)
"""
MASKED = """

async def _masked(query, agents, asked):
    import numpy as np

    draft = await agents["solver"].generate(f"{query.text}=")
    final = await agents["checker"].generate(f"{query.text}?{draft.text}=")
    for turn in (draft, final):
        turn.write(keep=np.arange(len(turn.tokens)) == 0, share=0.5)
    return Rewards(solver=_share(draft, "1"), checker=_share(final, "2"))


_SHAPES["masked"] = _masked
"""
COLUMNS = (
    "agent_defaults.columns={keep: {type: tensor, required: true}, share: {type: float, required: true}}"
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe with the losses of the page, and the one of its algorithm."""
    folder = tmp_path_factory.mktemp("recipe") / "tiny"
    shutil.copytree(TINY, folder)
    (block,) = (block for block in blocks("custom-losses.md") if block.file == "my-recipe/losses.py")
    (folder / "losses.py").write_text(block.text + CLIPPED)
    (folder / "workflow.py").write_text((folder / "workflow.py").read_text() + MASKED)
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


@pytest.mark.parametrize("mode", ["strict", "shared pool"])
def test_columns_of_the_workflows_are_masks_and_weights_of_tokens(
    runs_here: RunsHere, recipe: Path, mode: str
) -> None:
    """Those of the second update's samples travel with a suspended policy."""
    settings = [*SETTINGS, COLUMNS, "data.shape=masked"]
    settings += ["pool={name: shared, slots: 1}"] if mode == "shared pool" else []
    found, expected = (
        learned(
            runs_here.train(
                f"{loss} {mode}".replace(" ", "-"),
                *settings,
                f"agent_defaults.algorithm={{name: dapo, loss: losses.py:{loss}, loss_columns: {columns}}}",
                recipe=recipe,
            )
        )
        for loss, columns in (("first_by_columns", "[keep, share]"), ("first_by_lengths", "[]"))
    )
    assert any(line["grad_norm/solver"] > 1e-3 for line in found)
    for step, other in zip(found, expected, strict=True):
        assert step == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_a_column_that_samples_may_lack_is_refused(runs_here: RunsHere, recipe: Path) -> None:
    algorithm = "agents.solver.algorithm={loss: losses.py:first_by_columns, loss_columns: [keep]}"
    for columns in ("{}", "{keep: {type: tensor}}", "{keep: {type: str, required: true}}"):
        run = runs_here.train("refused", algorithm, f"agents.solver.columns={columns}", recipe=recipe)
        assert run.status == 2
        assert "loss_columns: 'keep' must be a column of agents.solver too" in " ".join(run.text.split())


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
