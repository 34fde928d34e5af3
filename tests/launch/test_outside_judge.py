"""Runs whose rewards come from outside: from a program of its own, which connects to them."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import flexmarl
from flexmarl.actors.credit.group_mean import GroupMean
from flexmarl.actors.errors import ConfigError
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.monitoring import store_view

from ..patience import PATIENCE_S
from .conftest import SIMULATED, TINY, Launcher
from .in_process import RunsHere

EXTERNAL = "{{type: float, required: true, written_by: external, timeout_s: {}}}"
REWARD = f"agents.solver.columns.reward={EXTERNAL}"
JUDGE = """
import asyncio, json, sys
import flexmarl

async def main():
    judged = []
    async with flexmarl.connect(sys.argv[1], wait_s=float(sys.argv[2])) as run:
        async for samples in run.unjudged("solver"):
            rewards = [text.count("7") / 3 for text in samples["text"]]
            await run.write("solver", {"sample_id": samples["sample_id"], "reward": rewards})
            judged += zip(samples["sample_id"], samples["text"], rewards)
    print(json.dumps(judged))

asyncio.run(main())
"""


def reward_of(text: str) -> float:
    """As ``JUDGE`` gives it."""
    return text.count("7") / 3


@contextmanager
def judge_of(directory: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-c", JUDGE, str(directory), str(PATIENCE_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as judge:
        try:
            yield judge
        finally:
            judge.kill()


@pytest.fixture(scope="module")
def judged(runs_here: RunsHere) -> tuple[Path, dict[str, float]]:
    """A run, and the rewards of its training's samples, as the judge gave them."""
    with judge_of(runs_here.runs / "judged") as judge:
        finished = runs_here.train(
            "judged",
            REWARD.format(PATIENCE_S),
            "training={steps: 25, queries_per_step: 4, trajectories_per_query: 8, micro_batch: 16}",
            "agents.solver.optimizer.lr=1.0e-2",
            "checkpoint.every=100",
        )
        assert finished.status == 0, finished.text
        printed, _ = judge.communicate(timeout=PATIENCE_S)
    assert judge.returncode == 0 and not finished.problems
    rewards = {name: reward for name, _, reward in json.loads(printed) if not name.startswith("eval:")}
    return finished.directory, rewards


def test_it_learns_what_the_judge_rewards(judged: tuple[Path, dict[str, float]]) -> None:
    """The workflow rewards the digit 1, the judge the digit 7."""
    metrics = [json.loads(line) for line in (judged[0] / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["reward/solver"] < 0.3 < 0.9 < metrics[-1]["reward/solver"]
    assert len(judged[1]) == 25 * 4 * 8


def test_advantages_are_those_of_the_judges_numbers(judged: tuple[Path, dict[str, float]]) -> None:
    directory, rewards = judged
    seen = 0
    with flexmarl.Samples(directory) as samples:
        for step in (1, 2, 25):
            found = samples.trajectories(step=step, evaluation=False)
            for trajectory in found:
                (turn,) = (turn for turn in trajectory.turns if turn.agent == "solver")
                name = f"{step}:{trajectory.query.id}_{turn.number}_{{}}"
                group = tuple(rewards[name.format(number)] for number in range(8))
                assert turn.reward == group[trajectory.number]
                assert turn.advantage == GroupMean(scale=True)(group)[trajectory.number]
                seen += 1
    assert seen == 3 * 4 * 8


def test_evaluations_are_judged_too(judged: tuple[Path, dict[str, float]]) -> None:
    events = [json.loads(line) for line in (judged[0] / "events.jsonl").read_text().splitlines()]
    before, after = [event["reward/solver"] for event in events if event["event"] == "evaluated"]
    assert before < 0.3 < 0.9 < after


def test_the_store_is_shown_after_the_end(judged: tuple[Path, dict[str, float]]) -> None:
    directory, rewards = judged
    (turn, _) = store_view.trajectory(directory, "25:q096_3").rows
    assert turn["agent"] == "solver" and turn["status"] == "consumed"
    assert turn["reward"] == rewards[str(turn["sample_id"])]


def test_a_killed_store_and_a_killed_judge_cost_no_reward(launcher: Launcher, tmp_path: Path) -> None:
    """Half of a group has its rewards when the store is killed: the run continues by itself, and a new judge gives
    those of the samples that are made again."""
    hold = tmp_path / "hold"
    hold.write_text("1")
    small = "training={steps: 3, queries_per_step: 1, trajectories_per_query: 4, micro_batch: 4}"
    run = launcher.train(
        "struck", *SIMULATED, small, REWARD.format(PATIENCE_S), f"data.hold={hold}", "checkpoint.every=1",
        "--restarts", "1",
    )  # fmt: skip
    with judge_of(run.directory) as first:
        run.wait_for_output("checkpoints/step_000001")
        first.kill()
    hold.unlink()
    asyncio.run(judge_half(run.directory))
    run.actors()["store"].kill()
    run.wait_for_output("continuing after step 1")
    with judge_of(run.directory) as second:
        assert run.wait() == 0, run.text
        second.communicate(timeout=PATIENCE_S)
    assert [line["step"] for line in run.metrics] == [1, 2, 3]
    with flexmarl.Samples(run.directory) as samples:
        turns = [
            turn
            for trajectory in samples.trajectories(evaluation=False)
            for turn in trajectory.turns
            if turn.agent == "solver"
        ]
    assert len(turns) == 3 * 4 and all(turn.reward == reward_of(turn.text) for turn in turns)
    run.assert_nothing_is_left()


async def judge_half(directory: Path) -> None:
    """Rewards two of the four samples that wait."""
    async with asyncio.timeout(PATIENCE_S), flexmarl.connect(directory) as connected:
        async for samples in connected.unjudged("solver"):
            if len(samples["sample_id"]) == 4:
                rewards = [reward_of(text) for text in samples["text"][:2]]
                await connected.write("solver", {"sample_id": samples["sample_id"][:2], "reward": rewards})
                return


def test_a_run_without_its_judge_names_what_it_waited_for(runs_here: RunsHere) -> None:
    finished = runs_here.train("alone", REWARD.format(0.2), "training.steps=1")
    assert finished.status != 0
    assert "within agents.solver.columns.reward.timeout_s=0.2" in finished.text
    assert "is the judge running?" in finished.text


@pytest.mark.parametrize("declared", ["{type: float}", "{type: int, required: true, written_by: external}"])
def test_another_reward_is_refused(declared: str) -> None:
    with pytest.raises(ConfigError, match="column 'reward': the workflow returns the rewards"):
        resolve(str(TINY), [f"agents.solver.columns.reward={declared}"])
