"""Engines that do not compute with the weights that they have loaded, in runs of real processes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .conftest import ONE_AGENT, REPRODUCIBLE, UNCHECKED, Launched, Launcher

SETTINGS = (*ONE_AGENT, *REPRODUCIBLE, "training.steps=3", "weights.probe_every=1")
TENSOR = "model.layers.0.self_attn.o_proj.weight"
# Imported by the process that all instances are forked from.
FAULTY_ENGINE = """
from flexmarl.actors.inference.engines.embedded import embedded_factory

class FaultyEngine(embedded_factory.TransformersEngine):
    loads = 0

    def weights_loaded(self, tensors, adapter=""):
        self.loads += 1
        if {faulty}:
            self.weights()[{tensor!r}].add_(1.0)
        super().weights_loaded(tensors, adapter)

embedded_factory.TransformersEngine = FaultyEngine
"""


def run_of(launcher: Launcher, name: str, folder: Path, faulty: str) -> Launched:
    """``faulty``: an expression of ``self.loads``, true for those after which one tensor is another."""
    (folder / "faulty_engine.py").write_text(FAULTY_ENGINE.format(faulty=faulty, tensor=TENSOR))
    prelude = (
        f"{UNCHECKED}\n"
        "import os\n"
        f"os.environ['PYTHONPATH'] += {':' + str(folder)!r}\n"
        "from flexmarl.launch.run import run\n"
        "modules_of = run.modules_of\n"
        "run.modules_of = lambda config: (*modules_of(config), 'faulty_engine')\n"
    )
    launched = launcher.train(name, *SETTINGS, f"data.trace={folder / 'trace'}", prelude=prelude)
    assert launched.wait() == 0, launched.text
    return launched


def learned(run: Launched, folder: Path) -> tuple[list[str], list[tuple[float, ...]]]:
    """All turns of the run, and the figures of its training, in which any sample shows."""
    keys = ("reward/solver", "loss/solver", "grad_norm/solver", "entropy/solver", "ratio_deviation/solver")
    figures = [tuple(line[key] for key in keys) for line in run.metrics]
    return sorted((folder / "trace").read_text().splitlines()), figures


def of_kind(run: Launched, event: str) -> list[dict[str, Any]]:
    return [line for line in run.events if line["event"] == event]


@pytest.fixture(scope="module")
def undisturbed(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], list[tuple[float, ...]]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = run_of(launcher, "undisturbed", folder, "False")
    assert not of_kind(run, "weights_reloaded")
    assert all(line["probe_max/solver"] < 1e-4 for line in run.metrics)
    assert all(line["probe_p99/solver"] <= line["probe_max/solver"] for line in run.metrics)
    assert not any("reloaded_instances/solver" in line for line in run.metrics)
    return learned(run, folder)


def test_a_tensor_that_is_lost_once_is_named_and_the_weights_are_loaded_again(
    launcher: Launcher, tmp_path: Path, undisturbed: Sequence[Any]
) -> None:
    run = run_of(launcher, "reloaded", tmp_path, "self.loads == 2")
    [event] = of_kind(run, "weights_reloaded")
    assert (event["instance"], event["policy"], event["version"]) == ("solver-0", "solver", 1)
    assert event["difference"] > event["bound"] == 0.01
    assert event["wrong"] == f"wrong: layer 0 ({TENSOR})"
    assert "solver-0 did not compute with version 1 of solver and loaded it again" in run.text
    assert [line.get("reloaded_instances/solver") for line in run.metrics] == [1, None, None]
    assert not of_kind(run, "actor_restarted")
    assert learned(run, tmp_path) == undisturbed
    run.assert_nothing_is_left()


def test_an_instance_whose_second_load_is_in_vain_fails_with_a_sentence_and_is_restarted(
    launcher: Launcher, tmp_path: Path, undisturbed: Sequence[Any]
) -> None:
    run = run_of(launcher, "failed", tmp_path, "self.loads in (2, 3)")
    restarted = of_kind(run, "actor_restarted")
    assert restarted and {event["actor"] for event in restarted} == {"solver-0"}
    sentence = "it does not compute with version 1, which it has loaded twice"
    assert sentence in restarted[0]["reason"] and f"layer 0 ({TENSOR})" in restarted[0]["reason"]
    assert learned(run, tmp_path) == undisturbed
    run.assert_nothing_is_left()
