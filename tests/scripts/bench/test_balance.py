"""``scripts/bench/run balance``: the parts by hand, and the command with a load too small for its figures."""

import json

import pytest

from flexmarl.actors.names import PolicyName
from scripts.bench.balance import Options, partitions, parts, tables
from scripts.bench.commands import main

from ...bench_tables import drawn

A, B, C = PolicyName("a"), PolicyName("b"), PolicyName("c")
_SMALL = (
    "training.queries_per_step=2",
    "training.trajectories_per_query=2",
    "agent_defaults.engine.max_batch=1",
)
_KEYS = {"static_s", "intra_s", "inter_s", "best_static_s", "lower_bound_s"}


def test_every_partition_is_tried_once() -> None:
    found = list(partitions([A, B, C], 5))
    assert len(found) == 6 and len({tuple(one.items()) for one in found}) == 6
    assert all(sum(one.values()) == 5 and min(one.values()) >= 1 for one in found)


def test_three_quarters_of_the_calls_are_to_one_of_four_agents() -> None:
    config = Options().config(1)
    assert len(config.policies) == 4 and sum(policy.instances for policy in config.policies.values()) == 16
    assert config.seed == 1


def test_the_figures_depend_on_the_seed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    results = []
    for _ in range(2):
        assert main(["balance", "--json", "--quick", *_SMALL]) == 0
        results.append(json.loads(capsys.readouterr().out))
    first, second = results
    assert first == second
    assert _KEYS | {f"{key[:-2]}_queue_p99_s" for key in _KEYS - {"lower_bound_s"}} <= first.keys()
    assert first["lower_bound_s"] <= min(first[key] for key in _KEYS)
    assert first["best_static_s"] <= first["intra_s"]
    assert first["inter_s"] < first["intra_s"], "instances move"
    assert first["rounds"][0]["moves"] > 0 and sum(first["rounds"][0]["best_partition"].values()) == 16
    assert [goal["key"] for goal in first["goals"]] == ["inter_s", "inter_s"]
    shown = drawn(tables, first)
    assert "best static" in shown and "lower bound" in shown and "moves" in shown


def test_wrong_overrides_are_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["balance", "balance.scope=everything"]) == 2
    assert "balance.scope" in capsys.readouterr().err
    assert parts(Options(rounds=2)) == 4
