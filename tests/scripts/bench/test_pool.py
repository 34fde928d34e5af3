"""``scripts/bench/run pool``: the load, the runs and the fixed divisions by hand, and the command."""

import json
from dataclasses import replace
from random import Random

import pytest

from flexmarl.actors.names import PolicyName
from flexmarl.actors.trainer.pool.slot_choice import AllocatorConfig
from scripts.bench.commands import main
from scripts.bench.pool import Options, parts, tables
from scripts.bench.pool_divisions import best_partition, best_sharing
from scripts.bench.pool_load import (
    MICRO_BATCH,
    QUERIES,
    TRAJECTORIES,
    Computation,
    Mix,
    PolicyCost,
    StepLoad,
    alone_s,
    draw_step,
    lower_bound_s,
    mix,
    mixes,
)
from scripts.bench.pool_run import run_steps

from ...bench_tables import drawn

A, B, C, D = (PolicyName(name) for name in "abcd")


def cost(ranks: int = 1, load_s: float = 0.0, save_s: float = 0.0, connect_s: float = 0.0) -> PolicyCost:
    return PolicyCost(ranks, 1.0, 1.0, load_s, save_s, connect_s)


def seconds(*each: float, ready_s: float = 0.0) -> list[Computation]:
    return [Computation(ready_s, one) for one in each]


class TestLoad:
    def test_the_mixes_have_about_a_third_of_the_slots_that_they_need(self) -> None:
        found = {name: (len(one.costs), one.slots) for name, one in mixes().items()}
        assert found == {"5x32B": (5, 16), "3x32B+7x14B": (10, 16), "15x14B": (15, 20)}
        for one in mixes().values():
            ranks = sum(policy.ranks for policy in one.costs.values())
            assert 0.3 <= one.slots / ranks <= 0.4

    def test_a_step_has_all_samples_of_its_queries(self) -> None:
        costs = mix(0, 6).costs
        load = draw_step(costs, Random(1))
        batches = sum(len(computations) - 1 for computations in load.values())
        samples = QUERIES * TRAJECTORIES * 25
        assert samples / MICRO_BATCH <= batches < samples / MICRO_BATCH + len(costs)
        mean_s = sum(one.seconds for own in load.values() for one in own[:-1]) / samples
        assert mean_s == pytest.approx(costs[PolicyName("14B-0")].sample_s, rel=0.1)
        for own in load.values():
            ready_s = [one.ready_s for one in own]
            assert ready_s == sorted(ready_s) and ready_s[0] > 0, "the optimizer step at the end"
        assert draw_step(costs, Random(1)) == load != draw_step(costs, Random(2))

    def test_the_lower_bound_is_the_longest_policy_or_the_work_of_all(self) -> None:
        costs = {A: cost(), B: cost(ranks=2)}
        load: StepLoad = {A: seconds(1.0, 1.0, ready_s=5.0), B: seconds(4.0, ready_s=4.0)}
        assert alone_s(load[A]) == 7.0 and alone_s(load[A], slowness=2.0) == 9.0
        assert lower_bound_s(load, costs, 4) == 8.0, "B alone"
        assert lower_bound_s(load, costs, 2) == 9.0, "from 4 s on: 2 + 8 on two slots"
        assert lower_bound_s({A: [*seconds(3.0), *load[A]]}, costs, 1) == 7.0, (
            "what is ready early is done early"
        )


class TestRun:
    def test_a_step_ends_with_its_last_computation(self) -> None:
        loads: list[StepLoad] = [{A: seconds(2.0, 3.0), B: seconds(1.0, ready_s=1.0)}, {A: seconds(2.0)}]
        steps = run_steps({A: cost(), B: cost()}, 1, loads)
        assert [step.step_s for step in steps] == [6.0, 2.0]

    def test_time_is_lost_if_a_state_moves_and_nothing_computes(self) -> None:
        costs = {A: cost(load_s=1.0, save_s=2.0), B: cost(load_s=1.0, connect_s=0.5)}
        load = {A: seconds(4.0), B: seconds(4.0)}
        # B, built last, has the slot, and leaves it at once: nothing was computed since its state was copied.
        (alone,) = run_steps(costs, 1, [load], AllocatorConfig(states_per_slot=1))
        assert (alone.step_s, alone.lost_s, alone.suspensions) == (12.5, 4.5, 2)
        (beside,) = run_steps(costs, 1, [load])
        assert (beside.step_s, beside.lost_s, beside.suspensions) == (8.0, 0.0, 1), "loaded beside the other"

    def test_the_base_part_moves_out_beside_what_follows_an_optimizer_step(self) -> None:
        costs = {A: replace(cost(save_s=2.0), base_s=3.0), B: cost()}
        step = [*seconds(4.0), Computation(0.0, 1.0, is_step=True)]
        loads: list[StepLoad] = [{A: seconds(4.0)}, {A: step}, {B: seconds(1.0)}]
        for states, after in ((2, (1.0, 0.0, 1)), (1, (3.0 + 1.0, 3.0, 1))):
            config = AllocatorConfig(states_per_slot=states)
            _, first, second = run_steps(costs, 1, loads, config)
            assert (first.step_s, first.lost_s) == (4.0 + 1.0, 0.0)
            assert (second.step_s, second.lost_s, second.suspensions) == after, (
                "B waits for room, if there is none"
            )
        loads[2:] = [{A: seconds(2.0)}, {B: seconds(1.0)}]
        _, _, beside, after_it = run_steps(costs, 1, loads, AllocatorConfig(states_per_slot=1))
        assert (beside.step_s, beside.lost_s) == (2.0, 0.0)
        assert (after_it.step_s, after_it.lost_s) == (1.0 + 2.0 + 1.0, 3.0), (
            "the rest of it, and the gradient of A"
        )

    def test_a_computation_may_follow_the_one_before(self) -> None:
        follows = Computation(0.0, 1.0, follows=True)
        load = {policy: [Computation(0.0, 1.0), follows, follows] for policy in (A, B)}
        (figures,) = run_steps({A: cost(), B: cost()}, 1, [load])
        assert figures.step_s == 6.0 and figures.suspensions in (5, 6), (
            "they take turns, and B has had the slot"
        )


class TestDivisions:
    def test_the_best_numbers_of_slots(self) -> None:
        four = Mix({A: cost(ranks=3), B: cost(ranks=3)}, 4)
        load = {A: seconds(10.0), B: seconds(2.0)}
        assert best_partition(four, [load]) == (10.0, {A: 3, B: 1})
        other = {A: seconds(2.0), B: seconds(10.0)}
        assert best_partition(four, [load, other])[0] == 15.0, "the numbers are fixed for all steps"

    def test_the_best_groups(self) -> None:
        two = Mix(dict.fromkeys((A, B, C, D), cost(load_s=100.0, connect_s=100.0)), 2)
        load = {A: seconds(5.0), B: seconds(4.0), C: seconds(3.0), D: seconds(2.0)}
        step_s, groups = best_sharing(two, [load], 10)
        assert step_s == 7.0 and set(groups) == {frozenset({A, D}), frozenset({B, C})}
        late = {A: seconds(6.0), B: seconds(4.0, ready_s=6.0), C: seconds(3.0, ready_s=6.0), D: seconds(1.0)}
        first, best = best_sharing(two, [late], 1)[0], best_sharing(two, [late], 20)[0]
        assert (first, best) == (13.0, 10.0), "B and C, whose work comes late, are parted"


_KEYS = {"static_s", "shared_s", "pool_s", "lower_bound_s", "swap_share"}


def test_the_figures_depend_on_the_seed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    results = []
    for _ in range(2):
        assert main(["pool", "--json", "--quick", "--steps=2"]) == 0
        results.append(json.loads(capsys.readouterr().out))
    first, second = results
    assert first == second
    assert first["mixes"].keys() == mixes().keys()
    for figures in first["mixes"].values():
        assert figures.keys() >= _KEYS
        assert figures["lower_bound_s"] <= min(figures[key] for key in ("static_s", "shared_s", "pool_s"))
        assert figures["pool_s"] <= 1.15 * figures["lower_bound_s"]
        assert figures["pool_s"] < figures["static_s"]
        best = figures["rounds"][0]
        assert sum(best["best_partition"].values()) == figures["slots"]
        assert sum(map(len, best["best_groups"])) == figures["policies"] == len(best["best_partition"])
        assert [goal["bare"] for goal in figures["goals"]] == [
            pytest.approx(figures[key], rel=1e-3) for key in ("static_s", "lower_bound_s", "shared_s")
        ]
    assert first["turns"]["swap_share"] < 0.1 < first["turns"]["without_prefetch"]
    shown = drawn(tables, first)
    assert "15x14B: 20 slots, 60 ranks" in shown and "suspensions per step" in shown


def test_each_part_is_reported() -> None:
    assert parts(Options(rounds=2)) == 7
