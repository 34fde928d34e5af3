"""``scripts/bench/run slots``: every source plays the task, and a result depends on the seed alone."""

import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from flexmarl.launch.bench.measure import Report
from flexmarl.launch.config.config_reading import resolve
from scripts.bench import league, replayed, slot_extra_queries, slot_objectives
from scripts.bench.slots import SOURCES, Options, measure, show
from scripts.bench.tails_recipe.workflow import train_query

from ...bench_tables import drawn

TAILS = Path(slot_extra_queries.__file__).parent / "tails_recipe"


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_plays_and_a_result_depends_on_the_seed_alone(name: str) -> None:
    options = Options(name=name, rounds=1, most_steps=3)
    result = measure(options, lambda part: None)
    assert result["uniform_rollouts"] == result["rollouts"] == 3 * 16 * 8
    assert 0 < result["taught"] <= 1
    assert "groups that teach" in drawn(show, result)
    assert measure(options, lambda part: None) == result


def test_a_league_is_measured_in_both_games_and_depends_on_the_seed_alone() -> None:
    options = league.Options(rounds=1, steps=4, every=2, groups=12, trajectories=2, matches=12)
    result = league.measure(options, lambda part: None)
    assert [(each["game"], each["seed"]) for each in result["rounds"]] == [("kuhn", 0), ("circle", 0)]
    assert "kuhn" in drawn(league.show, result)
    assert league.measure(options, lambda part: None) == result
    assert result["kuhn_ratio"] == pytest.approx(result["kuhn_league"] / result["kuhn_self_play"], rel=1e-2)


@pytest.mark.parametrize(
    ("weights", "exploitability"),
    [
        ((1.0, 0.0, 0.0), 3.0),  # rock alone loses to paper
        ((1 / 3, 1 / 6, 1 / 2), 0.0),  # the equilibrium
        ((0.5, 0.0, 0.5), 0.5),  # paper: 1.5 from rock, -1 from scissors
    ],
)
def test_the_exploitability_of_a_mixture_of_pure_players(
    weights: tuple[float, ...], exploitability: float
) -> None:
    pure = [{"": [float(action == chosen) for action in range(3)]} for chosen in range(3)]
    mixture = [*zip(weights, pure, strict=True)]
    assert league.GAMES["circle"].exploitability(mixture) == pytest.approx(exploitability, abs=1e-12)


def test_the_exploitability_of_a_mixture_in_kuhn_poker_is_that_of_its_parts_together() -> None:
    """Half always bets and half always passes: neither side of the mixture is what it plays in one game. Against it the
    best opponent knows nothing but the mean: by hand 1/3 and 1 alone, and less than their mean together."""
    game = league.GAMES["kuhn"]
    bets = {situation: [0.0, 1.0] for situation in game.situations}
    passes = {situation: [1.0, 0.0] for situation in game.situations}
    assert game.exploitability([(1.0, bets)]) == pytest.approx(1 / 3)
    assert game.exploitability([(1.0, passes)]) == pytest.approx(1.0)
    both = game.exploitability([(0.5, bets), (0.5, passes)])
    assert 0.0 < both < (1 / 3 + 1.0) / 2


@pytest.mark.parametrize("of_rounds", [replayed.of_recent, replayed.of_successes])
def test_a_replay_generates_fewer_trajectories_for_each_step(
    of_rounds: Callable[..., Callable[[Report], dict[str, Any]]],
) -> None:
    result = of_rounds(0, 1, quick=True)(lambda part: None)
    (each,) = result["rounds"]
    assert each["plain_rollouts"] == 16 * 8 * each["plain_steps"]
    assert 0.7 * 16 * 8 * each["steps"] <= each["rollouts"] < 16 * 8 * each["steps"], "a quarter comes again"
    assert 1.0 <= each["age"] <= 8.0 and result["settings"]["replay"]["share"] == 0.25
    assert "seed" in drawn(replayed.show, result)
    assert of_rounds(0, 1, quick=True)(lambda part: None) == result


def test_queries_beyond_a_step_shorten_it_and_a_result_depends_on_the_seed_alone() -> None:
    options = slot_extra_queries.Options(rounds=1, overrides=("training.steps=3",))
    result = slot_extra_queries.measure(options, lambda part: None)
    assert 0 < result["extra_s"] < result["sync_s"] and result["plain_s"] < result["sync_s"]
    assert 0 < result["carried"] <= 16 and result["trained"] == pytest.approx(
        48 - result["carried"], rel=1e-2
    )
    assert 0 < result["stale"] < result["plain_stale"] <= 1, "most queries end in the step that begins them"
    assert "passed on" in drawn(slot_extra_queries.show, result)
    assert slot_extra_queries.measure(options, lambda part: None) == result


def test_the_bound_of_a_step_is_half_of_the_longest_query_of_the_draws_in_turn() -> None:
    config = resolve(str(TAILS), ["training.steps=2", "training.queries_per_step=32"])
    steps = [[train_query(position, config.seed) for position in range(n, n + 32)] for n in (0, 32)]
    # The length by its definition, not by the engine: median 200, deviation 1, at most 8192, 10 ms a token.
    longest = [
        max(
            min(8192, round(200 * math.exp(Random(seed).gauss(0.0, 1.0))))
            for query in step
            for seed in query.data["seeds"]
        )
        for step in steps
    ]
    assert slot_extra_queries.bound_s(config) == pytest.approx(0.01 * sum(longest) / 2 / 2)


@pytest.mark.parametrize("name", slot_objectives.ARMS)
def test_every_objective_plays_and_a_result_depends_on_the_seed_alone(name: str) -> None:
    options = slot_objectives.Options(name, rounds=1, steps=4)
    result = slot_objectives.measure(options, lambda part: None)
    # Of 125 answers as likely: a sixth for each right token, and the two answers that are worth more.
    begin = 0.1 + 2 / 125
    assert begin < result["plain_reward"] < 1.5 and begin < result["reward"] < 1.5
    assert not name.startswith("loss_") or result["reward"] != result["plain_reward"], (
        "the filters find nothing so early"
    )
    assert result["plain_answers"] == 4 * 8 * 8 and result["answers"] >= 4 * 8 * 8
    assert "reward in the end" in drawn(slot_objectives.show, result)
    assert slot_objectives.measure(options, lambda part: None) == result


def test_a_filter_of_equal_rewards_pays_for_the_groups_that_it_replaces_and_learns_more_in_a_step() -> None:
    options = slot_objectives.Options("filter_equal_rewards")
    plain = slot_objectives.learn(slot_objectives.Arm(), options, 0)
    filtered = slot_objectives.learn(slot_objectives.ARMS[options.name], options, 0)
    assert plain.answers == 64 * plain.steps and filtered.answers > 64 * filtered.steps
    assert filtered.reward > plain.reward
