"""``flexmarl eval``: checkpoints and exported models are evaluated as in the run that trained them."""

from collections.abc import Iterator
from typing import Any

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.cli.main import main
from flexmarl.launch.config.config_reading import with_overrides
from flexmarl.launch.config.evaluation_config import evaluation_config

from ..conftest import TINY
from ..in_process import Finished, RunsHere


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    run = RunsHere(tmp_path_factory.mktemp("runs")).train(
        "trained",
        "training.steps=2",
        "checkpoint.every=1",
        "evaluation.every=1",
        "agent_defaults.sft.batches=3",
    )
    assert run.status == 0, run.text
    yield run


def evaluated(run: Finished) -> list[dict[str, Any]]:
    assert run.status == 0, run.text
    return [
        {name: value for name, value in event.items() if name not in ("time", "event", "step", "eval_s")}
        for event in run.events
        if event["event"] == "evaluated"
    ]


def test_a_checkpoint_is_evaluated_as_in_its_run(trained: Finished) -> None:
    """Greedy decoding: the same weights give the same answers."""
    runs, of_steps = RunsHere(trained.directory.parent), evaluated(trained)
    assert len(of_steps) == 3
    newest = runs.evaluate("newest", trained.directory)
    assert evaluated(newest) == [of_steps[2]]
    assert "Evaluated in " in newest.text and not newest.problems
    assert not newest.metrics and not list((newest.directory / "checkpoints").iterdir()), "nothing is trained"
    assert evaluated(runs.evaluate("first", trained.directory / "1")) == [of_steps[1]]


def test_an_exported_model_is_evaluated_for_all_policies_of_a_recipe(trained: Finished) -> None:
    runs, model = RunsHere(trained.directory.parent), trained.directory.parent / "model"
    assert main(["export", str(trained.directory), "solver", str(model)]) == 0
    (metrics,) = evaluated(runs.evaluate("of-model", model, "--recipe", str(TINY)))
    (of_both,) = evaluated(runs.evaluate("of-both", trained.directory / "checkpoints/step_000002/solver",
                                         "--recipe", str(TINY)))  # fmt: skip
    assert metrics == of_both


def test_repeats_give_pass_at_k(trained: Finished) -> None:
    words = ("--repeats", "2", "evaluation.temperature=0.7")
    (metrics,) = evaluated(RunsHere(trained.directory.parent).evaluate("repeats", trained.directory, *words))
    assert {"pass@1", "pass@2"} <= metrics.keys()


def test_all_policies_are_frozen_and_the_settings_are_the_runs(trained: Finished) -> None:
    config = evaluation_config(trained.directory, None, ["evaluation.success=reward/solver"], None)
    assert not config.trained and config.training.steps == 0
    assert config.evaluation.success == "reward/solver" and config.seed == 7
    for name, policy in config.policies.items():
        assert policy.init_from == trained.directory / "checkpoints" / "step_000002" / name


@pytest.mark.parametrize(
    ("source", "recipe", "message"),
    [
        ("nothing", None, "nothing: there is no such run or model"),
        (".", None, "is not a run: name the recipe .* by --recipe"),
        ("nothing", str(TINY), "nothing: there is no such run: write RUN_DIR"),
        ("trained/7", None, "has no checkpoint of step 7; there are: 1, 2"),
    ],
)
def test_a_source_without_weights_is_refused(
    trained: Finished, source: str, recipe: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluation_config(trained.directory.parent / source, recipe, [], None)


def test_a_run_that_only_evaluates_needs_no_trained_policy_and_steps_do(trained: Finished) -> None:
    config = evaluation_config(trained.directory, None, [], None)
    with pytest.raises(ConfigError, match=r"all policies have train=false.*training\.steps=0"):
        with_overrides(config, ["training.steps=2"], "test")
