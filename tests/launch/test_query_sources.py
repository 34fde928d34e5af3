"""A query source and a group filter of the user's own in a real run: killed and resumed, it draws and leaves out what
it would have drawn and left out."""

import signal
from pathlib import Path

import pytest

from flexmarl.actors.names import Step
from flexmarl.actors.orchestrator import checkpoint
from flexmarl.actors.orchestrator.queries.queries_state import QueriesState
from flexmarl.launch.run_folder.samples.reader import Samples

from .conftest import SIMULATED_POLICIES, Launcher
from .in_process import RunsHere

STEPS = 8
WORKFLOW = '''
import asyncio
from pathlib import Path
from random import Random
from flexmarl.actors import Query, ReplaySource, Rewards

HELD_FROM = 14
"""The queries of later positions wait for the file ``hold`` to disappear: the run can't end before it is killed."""


async def workflow(query, agents):
    while query.data["position"] >= HELD_FROM and Path(query.data["hold"]).exists():
        await asyncio.sleep(0.01)
    turns = [await agents["solver"].generate(query.text) for _ in range(2)]
    solved = Random(query.id).random() < 0.5  # as in every other run
    return Rewards(
        solver=sum(len(turn.tokens) for turn in turns) if solved else 0.0, metrics={"accuracy": float(solved)}
    )


def train_query(position, seed, hold):
    return Query(f"q{position:03}", f"{position}=", {"position": position, "hold": hold})


def eval_queries(seed, hold):
    return []


def long_groups(group):
    tokens = sum(len(turn.tokens) for turn in group.turns)
    return f"{tokens} tokens" if tokens % 3 == 0 else None


def query_source(positions, seed, hold):
    return ReplaySource(positions, share=0.4, limit=8)
'''
CONFIG = "agents: {solver: {}}\n"
SETTINGS = (
    *SIMULATED_POLICIES,
    "engine.median_tokens=20",
    f"training={{steps: {STEPS}, queries_per_step: 4, trajectories_per_query: 2, micro_batch: 4}}",
    "rollout={filters: [equal_rewards, 'workflow.py:long_groups'], replacement_queries: 3}",
    "checkpoint.every=2",
)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "workflow.py").write_text(WORKFLOW)
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def drawn(run: Path) -> dict[int, set[str]]:
    """The queries of each step, as they are recorded."""
    queries: dict[int, set[str]] = {}
    with Samples(run) as samples:
        for trajectory in samples.trajectories():
            queries.setdefault(trajectory.step, set()).add(trajectory.query.id)
    return queries


def last_state(run: Path) -> QueriesState:
    return checkpoint.load(checkpoint.committed_folder(run / "checkpoints", Step(STEPS))).queries


def test_a_run_that_is_killed_draws_what_it_would_have_drawn(
    launcher: Launcher, runs_here: RunsHere, recipe: Path, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    settings = (*SETTINGS, f"data.hold={hold}")
    whole = runs_here.train("whole", *settings, recipe=recipe)
    assert whole.status == 0, whole.text
    hold.touch()
    run = launcher.train("killed", *settings, recipe=recipe)
    run.wait_for_output("checkpoints/step_000002")
    run.signal(signal.SIGKILL)
    run.wait()
    assert len(run.metrics) < STEPS
    run.assert_nothing_is_left()
    hold.unlink()
    resumed = launcher.resume("killed")
    assert resumed.wait() == 0, resumed.text
    expected = drawn(whole.directory)
    assert len(expected) == STEPS
    later = range(3, STEPS + 1)  # the records of the steps before may not have been on the disk yet
    recorded = drawn(run.directory)
    assert [recorded[step] for step in later] == [expected[step] for step in later]
    assert last_state(run.directory) == last_state(whole.directory)
    figures = [line["source/given_again"] for line in whole.metrics]
    assert [line["source/given_again"] for line in run.metrics] == figures
    for name in ("filters/equal_rewards", "filters/long_groups", "replaced_queries"):
        counts = [line.get(name, 0) for line in whole.metrics]
        assert sum(counts) and [line.get(name, 0) for line in run.metrics] == counts, name
    assert figures[-1] == sum("#" in query for queries in expected.values() for query in queries) > 3
