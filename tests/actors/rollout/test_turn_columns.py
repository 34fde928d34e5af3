"""Columns that a workflow writes for its turns: kept with the samples, or refused at once."""

import asyncio
import sys
from pathlib import Path

import pytest

from flexmarl.actors.columns.declared_columns import Column
from flexmarl.actors.columns.store_client import ExperienceReader
from flexmarl.actors.errors import RecipeError
from flexmarl.actors.messages import GroupClosed, Query
from flexmarl.actors.names import AgentName
from flexmarl.actors.workflow import Turn
from flexmarl.core.system import ActorSystem

from ...patience import PATIENCE_S
from ..stores import SOLVER
from .fake_cluster import FakeCluster, evaluate, serve, start_step

COLUMNS = {
    "difficulty": Column(type="float"),
    "plan": Column(type="tokens"),
    "judged": Column(type="float", required=True, written_by="external"),
}


@pytest.fixture
def cluster(system: ActorSystem, tmp_path: Path) -> FakeCluster:
    made = FakeCluster(system, tmp_path)
    made.columns = {"solver": COLUMNS}
    return made


async def run(cluster: FakeCluster, body: str) -> GroupClosed:
    """One group of two trajectories."""
    rollout = await cluster.open(f"turn = await agents['solver'].generate('x')\n    {body}")
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [Query("q", "2+2")], 2, {"solver": 0, "judge": 0})
    return await cluster.closed()


async def test_what_is_written_is_in_the_store(cluster: FakeCluster) -> None:
    body = "turn.write(difficulty=0.25); turn.write(plan=turn.tokens); return Rewards(solver=1.0)"
    group = await run(cluster, body)
    assert group.samples[AgentName("solver")] == 2
    found = await cluster.store.select("difficulty = 0.25 and status = 'writing'", 10)
    assert [row["sample_id"] for row in found.rows] == ["1:q_0_0", "1:q_0_1"]
    ids = [row["sample_id"] for row in found.rows]
    await cluster.store.write("judge", {"solver": {"sample_id": ids, "judged": [1.0, 0.0]}})
    leased = await cluster.store.lease(SOLVER, 0, 2)
    reader = ExperienceReader(cluster.store.ref, cluster.places)
    rows = await reader.samples(leased)
    columns = await reader.columns(leased)
    assert [plan.tolist() for plan in columns["plan"]] == [[*row.tokens] for row in rows]
    assert columns["judged"] == [1.0, 0.0]


async def test_a_turn_names_its_sample_for_who_writes_from_outside(cluster: FakeCluster) -> None:
    group = await run(cluster, "return Rewards(solver=1.0, metrics={turn.sample_id: 1.0})")
    assert group.samples[AgentName("solver")] == 2 and not group.failures


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (
            "turn.write(dificulty=0.3)",
            r"agent solver has no column 'dificulty' .*the workflow may write: difficulty \(float\), plan \(tokens\)",
        ),
        (
            "turn.write(judged=0.3)",
            "agent solver: column judged is a float that the workflow does not write: .*written_by=external",
        ),
    ],
)
async def test_what_no_trajectory_can_mend_ends_the_run(cluster: FakeCluster, body: str, error: str) -> None:
    running = asyncio.ensure_future(run(cluster, f"{body}; return Rewards(solver=1.0)"))
    with pytest.raises(RecipeError, match=error):
        raise await asyncio.wait_for(asyncio.shield(cluster.system.failure), PATIENCE_S)
    running.cancel()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (
            "turn.write(difficulty='hard')",
            r"InvalidColumn: agent solver: column difficulty wants a finite float, not 'hard' \(str\), for turn "
            r"1:q_0_0; the workflow may write: difficulty \(float\), plan \(tokens\)",
        ),
        (
            "turn.write(difficulty=0.5); turn.write(difficulty=0.5)",
            "InvalidColumn: agent solver: column difficulty, a float, of turn 1:q_0_0 was written already",
        ),
        ("turn.write(plan=[0.5] * 1000)", "column plan wants tokens: a flat sequence of ints"),
    ],
)
async def test_a_value_that_a_column_does_not_take_fails_the_trajectory(
    cluster: FakeCluster, body: str, error: str
) -> None:
    group = await run(cluster, f"{body}; return Rewards(solver=1.0)")
    assert group.samples[AgentName("solver")] == 0 and len(group.failures) == 2
    failure = min(group.failures, key=lambda failed: failed.trajectory)
    with pytest.raises(RuntimeError, match=error):
        raise RuntimeError(failure.error)
    assert "in workflow" in failure.remote_traceback, "it says which line wrote it"


async def test_of_several_columns_all_or_none_is_written(cluster: FakeCluster) -> None:
    body = """
    try:
        turn.write(difficulty=0.5, plan="no tokens")
    except Exception:
        turn.write(difficulty=0.75)
    return Rewards(solver=1.0)
"""
    group = await run(cluster, body)
    assert group.samples[AgentName("solver")] == 2 and not group.failures
    assert (await cluster.store.select("difficulty = 0.75", 10)).total == 2


async def test_a_required_column_that_is_left_out_fails_the_trajectory(cluster: FakeCluster) -> None:
    cluster.columns = {"solver": {"score": Column(type="int", required=True)}}
    body = """
    if turn.sample_id.endswith("_1"):
        turn.write(score=3)
    return Rewards(solver=1.0)
"""
    group = await run(cluster, body)
    assert group.samples[AgentName("solver")] == 1
    (failed,) = group.failures
    assert failed.trajectory == "1:q_0"
    assert failed.error == (
        "InvalidColumn: agent solver: the workflow has not written score of turn 1:q_0_0, which "
        "agents.solver.columns.score.required demands: Turn.write before it returns"
    )


async def test_a_write_after_the_workflow_has_returned_is_refused(cluster: FakeCluster) -> None:
    await run(cluster, "workflow.turn = turn; return Rewards(solver=1.0)")
    turn = sys.modules[f"flexmarl_recipe_{cluster.folder.name}"].workflow.turn
    with pytest.raises(
        RecipeError, match="difficulty of turn 1:q_0_. was written after its workflow had returned"
    ):
        turn.write(difficulty=0.5)


async def test_an_evaluation_may_write_too(cluster: FakeCluster) -> None:
    rollout = await cluster.open(
        "turn = await agents['solver'].generate('x'); turn.write(difficulty=1.0); return Rewards(solver=1.0)"
    )
    await serve(rollout, "solver", 0)
    result = await evaluate(rollout, [Query("e", "2+2")], {"solver": 0, "judge": 0})
    assert result.failures == [] and (await cluster.store.select("", 10)).total == 0


def test_a_turn_made_by_hand_needs_a_writer() -> None:
    written: dict[str, object] = {}
    Turn("solver", "x", (), (), writer=written.update).write(difficulty=0.5)
    assert written == {"difficulty": 0.5}
    with pytest.raises(RecipeError, match="a turn of 'solver' that was not generated has no columns"):
        Turn("solver", "x", (), ()).write(difficulty=0.5)
