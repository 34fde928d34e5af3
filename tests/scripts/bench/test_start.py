"""``scripts/bench/run start`` with one node: its figures mean nothing."""

import asyncio

from scripts.bench.start import GOALS, Options, measure, parts, tables

from ...bench_tables import drawn


def test_every_figure_is_there_and_possible() -> None:
    reported: list[str] = []
    options = Options(rounds=1, nodes=1)
    result = asyncio.run(measure(options, reported.append))
    assert reported == ["one host", "a head and a node", "1 nodes that wait for the run"]
    assert parts(options) == len(reported) and result["nodes"] == 1
    for key in ("one_host_s", "two_nodes_s", "joined_s"):
        assert 0 < result[key] < 1e3 and result["rounds"][key] == [result[key]], key
    assert [goal["key"] for goal in result["goals"]] == [goal.key for goal in GOALS]
    assert "start of a run, 1 nodes" in drawn(tables, result)
