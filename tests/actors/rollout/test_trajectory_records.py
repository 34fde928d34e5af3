"""Trajectories that a worker records: after its samples are in the store, beside its work."""

import asyncio
from statistics import fmean

import pytest

from flexmarl.actors.messages import Query
from flexmarl.actors.recorded_trajectory import RecordedTurn, TrajectoryRow, rows_of, turns_of
from flexmarl.actors.rollout.rollout import Rollout
from flexmarl.actors.rollout.trajectory_records import asked_prompt
from flexmarl.actors.workflow import Turn

from ...patience import PATIENCE_S
from .fake_cluster import QUERY, TWO_TURNS, Archive, FakeCluster, evaluate, serve, start_step

WITH_FAILURES = """
    draft = await agents["solver"].generate(query.text)
    if len(draft.text) == 1:
        raise ValueError("too short")
    notes = [draft, "?"]
    final = await agents["judge"].generate(notes)
    notes.append("changed later")
    return Rewards(solver=float(len(draft.text)), judge=1.0, metrics={"accuracy": 0.5})
"""


async def opened(cluster: FakeCluster, body: str = TWO_TURNS) -> Rollout:
    cluster.archive = Archive()
    rollout = await cluster.open(body)
    for agent in ("solver", "judge"):
        await serve(rollout, agent, 4)
    return rollout


async def recorded(cluster: FakeCluster, count: int = 1) -> list[TrajectoryRow]:
    """The rows of the first ``count`` records, once they are there."""
    assert cluster.archive is not None
    async with asyncio.timeout(PATIENCE_S):
        while len(cluster.archive.records) < count:
            await asyncio.sleep(0.001)
    return [row for record in cluster.archive.records for row in rows_of(record.rows)]


async def test_a_group_is_recorded_with_texts_rewards_and_advantages(cluster: FakeCluster) -> None:
    rollout = await opened(cluster)
    await start_step(rollout, 5, [QUERY], 6, {"solver": 4, "judge": 4})
    group = await cluster.closed()
    rows = await recorded(cluster)
    assert [row.number for row in rows] == list(range(6)) and not any(row.failure for row in rows)
    assert [row.rewards["solver"] for row in rows] == group.rewards[next(iter(group.rewards))]
    assert cluster.archive is not None
    (record,) = cluster.archive.records
    assert (record.step, record.evaluation, record.query, record.text) == (5, False, "q7", "2+2")
    solver, judge = turns_of(record.content)[3]
    samples = {sample.sample_id: sample for sample in await cluster.rows("solver", 4, 6)}
    sample = samples["5:q7_0_3"]
    assert (solver.prompt, solver.text, solver.tokens) == (("2+2",), "x" * len(sample.tokens), sample.tokens)
    mean = fmean(group.rewards[next(iter(group.rewards))])
    assert solver.reward == sample.reward
    assert solver.advantage == sample.advantage == pytest.approx(sample.reward - mean, abs=1e-12)
    assert (judge.agent, judge.prompt, judge.version, judge.finish_reason) == ("judge", (0, "?"), 4, "stop")
    assert solver.logprobs == (-0.5,) * len(solver.tokens)


async def test_failed_trajectories_are_recorded_with_the_turns_that_had_ended(cluster: FakeCluster) -> None:
    rollout = await opened(cluster, WITH_FAILURES)
    await start_step(rollout, 5, [QUERY], 8, {"solver": 4, "judge": 4})
    group = await cluster.closed()
    rows = await recorded(cluster)
    failed = [row for row in rows if row.failure]
    assert len(rows) == 8 and len(failed) == len(group.failures) > 0
    assert {row.failure for row in failed} == {"ValueError: too short"}
    assert all(row.rewards == {} and [cells[1] for cells in row.samples] == ["solver"] for row in failed)
    assert cluster.archive is not None
    prompts = [turns[1].prompt for turns in turns_of(cluster.archive.records[0].content) if len(turns) == 2]
    assert set(prompts) == {(0, "?")}, "as it was when the turn was asked for"


async def test_an_evaluation_is_recorded_though_it_never_reaches_the_store(cluster: FakeCluster) -> None:
    rollout = await opened(cluster)
    await evaluate(rollout, [QUERY, Query("q8", "3+3")], {"solver": 4, "judge": 4})
    rows = await recorded(cluster, 2)
    assert cluster.archive is not None
    assert {(r.step, r.evaluation, r.query) for r in cluster.archive.records} == {
        (0, True, "q7"),
        (0, True, "q8"),
    }
    assert all(row.metrics == {"accuracy": 0.5} for row in rows)
    turn: RecordedTurn = turns_of(cluster.archive.records[0].content)[0][0]
    assert turn.reward == len(turn.text) and turn.advantage is None


async def test_a_run_without_an_archive_records_nothing(cluster: FakeCluster) -> None:
    rollout = await cluster.open(TWO_TURNS)
    for agent in ("solver", "judge"):
        await serve(rollout, agent, 4)
    await start_step(rollout, 5, [QUERY], 2, {"solver": 4, "judge": 4})
    await cluster.closed()
    assert rollout.statistics() == {}


async def test_an_archive_that_does_not_answer_delays_no_group(cluster: FakeCluster) -> None:
    rollout = await opened(cluster)
    assert cluster.archive is not None
    cluster.archive.gate.clear()
    for step in (5, 6):
        await start_step(rollout, step, [QUERY], 2, {"solver": 4, "judge": 4})
        await cluster.closed()
    assert cluster.archive.records == [] and rollout.statistics() == {"dropped_records": 0}
    cluster.archive.gate.set()
    assert len(await recorded(cluster, 2)) == 4


async def test_what_is_left_is_sent_when_the_worker_stops(cluster: FakeCluster) -> None:
    rollout = await opened(cluster)
    assert cluster.archive is not None
    cluster.archive.gate.clear()
    await evaluate(rollout, [QUERY], {"solver": 4, "judge": 4})
    cluster.archive.gate.set()
    await cluster.system.remove("rollout")
    assert len(cluster.archive.records) == 1


def test_turns_of_the_prompt_are_numbers_and_those_by_hand_text() -> None:
    turn = Turn("solver", "four", (1,), (2,), sample_id="5:q_7_3_1")
    by_hand = Turn("solver", "five", (1,), (2,))
    message = {"role": "user", "content": "x"}
    assert asked_prompt("2+2") == ("2+2",)
    assert asked_prompt(turn) == (3,)
    assert asked_prompt([turn, message, by_hand]) == (3, message, "five")
    assert asked_prompt([turn, message])[1] is not message
