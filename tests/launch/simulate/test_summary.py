"""The figures of a simulated run, from its rows and the statistics of its engines."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flexmarl.actors.names import PolicyName
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.simulate.cluster_links import Move, MoveKind
from flexmarl.launch.simulate.scenario import model_shapes, read_scenario
from flexmarl.launch.simulate.scenario_run import play_scenario, run_scenario
from flexmarl.launch.simulate.simulation import Simulation
from flexmarl.launch.simulate.summary import Summary, Transfers, summary_of, transfers_of

RECIPE = Path(__file__).parents[1] / "recipes" / "simulated"
SCENARIO = Path(__file__).parent / "scenario.yaml"


def row(step: int, step_s: float, rollout_s: float, overlap_s: float) -> dict[str, float]:
    return {
        "step": step, "step_s": step_s, "rollout_s": rollout_s, "overlap_s": overlap_s, "tokens": 500,
        "failed_trajectories": 0, "turns/solver": 6, "turns/checker": 4,
        "backward_s/solver": 4.0, "optimizer_s/solver": 9.0, "backward_s/checker": 5.0, "optimizer_s/checker": 9.0,
        "pool_slots_s/solver": 10.0, "pool_slots_s/checker": 14.0,
        "pool_swapping_s/solver": 3.0, "swap_s": 1.5, "weights_s": 0.5, "time_s": 100.0 * step,
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
    assert (figures.training_alone_s, figures.swaps_exposed_s, figures.weights_exposed_s) == (6.0, 1.5, 0.5)
    assert figures.instances_busy == pytest.approx(2 * 10.0 / (2 * 100.0)), "of both steps"
    assert (figures.prefill_share, figures.decode_share) == pytest.approx((0.02, 0.08))
    assert figures.queue_s == pytest.approx(10.0 / 20)
    assert figures.training_busy == pytest.approx(24.0 / (4 * 20.0)), "on four slots"
    assert figures.swapping_s == 3.0


def move(kind: MoveKind, begin_s: float, end_s: float, version: int = 1) -> Move:
    return Move(kind, PolicyName("solver"), version, begin_s, end_s)


def test_transfers_that_are_under_way_at_once_count_once() -> None:
    moves = [
        move("suspend", 0, 4), move("resume", 2, 6), move("resume", 3, 5), move("copy", 0, 20),
        move("publish", 5, 9), move("install", 9, 11), move("install", 10, 12), move("resume", 100, 200, 2),
        move("install", 12, 13, 2), move("install", 50, 60, 3),
    ]  # fmt: skip
    assert transfers_of(moves, range(2)) == Transfers(
        suspend_s=2.0, resume_s=2.0, copy_s=10.0, publish_s=2.0, install_s=2.0, swaps_s=3.0, weights_s=4.0
    )
    assert transfers_of([], range(2)) == Transfers()


def test_what_no_step_waits_for_is_hidden(tmp_path: Path) -> None:
    made = summary(tmp_path, row(1, 20.0, 12.0, 3.0))
    figures = replace(made, transfers=Transfers(swaps_s=6.0, weights_s=0.25))
    assert figures.swaps_hidden_s == 4.5
    assert figures.weights_hidden_s == 0.0, (
        "the wait begins with the optimizer step's end, before the transfer"
    )
    assert "4.5 hidden" in figures.text() and json.loads(figures.as_json())["swaps_hidden_s"] == 4.5


def test_a_port_that_is_used_for_half_of_the_time_is_named(tmp_path: Path) -> None:
    made = summary(tmp_path, row(1, 20.0, 12.0, 3.0))
    assert "link" not in made.text()
    assert "link: host-0 out, 64% of" in replace(made, busiest_port="host-0 out", port_busy=0.64).text()


def test_the_states_of_a_slot_are_a_line_where_the_plan_has_a_sentence(tmp_path: Path) -> None:
    made = summary(tmp_path, row(1, 20.0, 12.0, 3.0))
    assert "By the plan" not in made.text()
    figures = run_scenario(read_scenario(SCENARIO, ["training.steps=1"]), tmp_path / "simulated")
    assert "\nBy the plan pool.states_per_slot=2: the next policy's state fits" in figures.text()
    assert json.loads(figures.as_json())["slot_states"] in figures.text()


def test_a_run_on_one_host_has_the_transfers_that_its_links_give(tmp_path: Path) -> None:
    """One policy of 16.8 million parameters of 2 bytes, on one rank: its weights leave by the first rank's link of 48
    GB/s, and enter by that of the instance, as long. They are shorter than any computation, which hides nothing."""
    overrides = ["agents.judge={policy: solver}", "workload.agents.judge.answer={median: 50, sigma: 0.8}"]
    overrides += ["trainer.ranks=1", "pool.slots=1", "training.steps=3"]
    scenario = read_scenario(SCENARIO, overrides)
    simulation, config = play_scenario(scenario, tmp_path / "run")
    figures = summary_of(simulation, config)
    (shape,) = model_shapes(scenario.config).values()
    copy_s = 2 * shape.parameters / 48e9
    assert figures.transfers.publish_s == pytest.approx(copy_s)
    assert figures.transfers.install_s == pytest.approx(copy_s)
    assert (figures.transfers.suspend_s, figures.swaps_exposed_s) == (0.0, 0.0), "it stays on its slot"
    assert figures.weights_exposed_s == pytest.approx(2 * copy_s), (
        "at the end of each step there is nothing else"
    )
    parts = (figures.rollout_alone_s, figures.overlap_s, figures.training_alone_s, figures.weights_exposed_s)
    assert sum(parts) == pytest.approx(figures.step_s)


def test_the_first_of_three_steps_does_not_count(tmp_path: Path) -> None:
    steps = (
        row(1, 40.0, 12.0, 3.0),
        row(2, 20.0, 12.0, 3.0),
        row(3, 30.0, 12.0, 3.0),
        row(4, 80.0, 12.0, 3.0),
    )
    assert (summary(tmp_path, *steps).steps, summary(tmp_path / "more", *steps).step_s) == (2, 25.0)


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


def test_steps_without_a_turn_have_a_summary(tmp_path: Path) -> None:
    never = ["workload.calls=[{agent: judge, chance: 0}]", "training.steps=1"]
    summary = run_scenario(read_scenario(SCENARIO, never), tmp_path / "run")
    assert (summary.steps, summary.queue_s, summary.tokens_per_s) == (1, 0, 0) and summary.text()
