"""The figures of a simulated run, from its rows and the statistics of its engines."""

import json
from pathlib import Path

import pytest

from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.simulate.simulation import Simulation
from flexmarl.launch.simulate.summary import Summary, summary_of

RECIPE = Path(__file__).parents[1] / "recipes" / "simulated"


def row(step: int, step_s: float, rollout_s: float, overlap_s: float) -> dict[str, float]:
    return {
        "step": step, "step_s": step_s, "rollout_s": rollout_s, "overlap_s": overlap_s, "tokens": 500,
        "failed_trajectories": 0, "turns/solver": 6, "turns/checker": 4,
        "backward_s/solver": 4.0, "optimizer_s/solver": 9.0, "backward_s/checker": 5.0, "optimizer_s/checker": 9.0,
        "pool_computing_s/solver": 5.0, "pool_computing_s/checker": 7.0,
        "pool_swapping_s/solver": 3.0,
    }  # fmt: skip


def summary(folder: Path, *rows: dict[str, float]) -> Summary:
    directory = RunDirectory.create(folder / "run", "")
    directory.metrics.write_text("".join(f"{json.dumps(figures)}\n" for figures in rows))
    simulation = Simulation(directory)
    engine = {"engine_prefill_s": 2.0, "engine_decode_s": 8.0, "engine_queue_s": 5.0}
    simulation.statistics = {"solver-0": engine, "solver-1": engine, "router": {"moves": 1.0}}
    overrides = ["pool.name=shared", "pool.slots=4", "trainer.ranks=2"]
    return summary_of(simulation, resolve(str(RECIPE), overrides))


def test_the_last_of_several_steps_counts_for_the_engines_alone(tmp_path: Path) -> None:
    figures = summary(tmp_path, row(1, 20.0, 12.0, 3.0), row(2, 80.0, 12.0, 3.0))
    assert (figures.steps, figures.step_s, figures.tokens_per_s) == (1, 20.0, 25.0)
    assert (figures.rollout_alone_s, figures.overlap_s, figures.after_rollout_s) == (9.0, 3.0, 8.0)
    assert figures.instances_busy == pytest.approx(2 * 10.0 / (2 * 100.0)), "of both steps"
    assert figures.queue_s == pytest.approx(10.0 / 20)
    assert figures.training_busy == pytest.approx(2 * 12.0 / (4 * 20.0)), "two ranks each, on four slots"
    assert figures.swapping_s == 3.0


@pytest.mark.parametrize(
    ("rollout_s", "overlap_s", "bound"),
    [
        (18.0, 1.0, "nothing is trained meanwhile"),
        (18.0, 16.0, "together"),
        (2.0, 1.0, "after the last rollout"),
    ],
)
def test_the_longest_part_is_named(tmp_path: Path, rollout_s: float, overlap_s: float, bound: str) -> None:
    figures = summary(tmp_path, row(1, 20.0, rollout_s, overlap_s))
    assert bound in figures.bound and figures.bound in figures.text()
    assert json.loads(figures.as_json())["bound"] == figures.bound
