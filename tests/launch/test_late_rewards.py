"""Rewards from outside that come late: chats are answered at once, steps close without them, and each reward is trained
once or counted as late."""

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import flexmarl
from flexmarl.actors.errors import StoreError
from flexmarl.actors.messages import Query
from flexmarl.core.errors import ActorDead, CallTimeout
from flexmarl.launch.errors import RunUnreachable
from flexmarl.launch.run.connected_run import ConnectedRun

from ..patience import PATIENCE_S
from .conftest import SIMULATED, Launcher, json_lines
from .in_process import run_in_loop, wait_for_step
from .run_files import events, trained

REWARD = "agents.solver.columns.reward={{type: float, required: true, written_by: external, timeout_s: {}}}"
ASYNC = (
    *SIMULATED,
    "mode=async",
    "max_staleness=2",
    "agents.solver.algorithm.correction=decoupled",
    "rollout.reward_grace_s=0.2",
    REWARD.format(PATIENCE_S),
)
# Drawn groups hold their step: it is complete when the judge has rewarded all of them, however slow the machine is, and
# no policy steps while the judge leaves one out. A chat holds none.
HELD = (
    *ASYNC,
    f"rollout.reward_grace_s={PATIENCE_S}",
    "training.steps=100000",
    "checkpoint.every=100000",
)


@pytest.fixture(autouse=True)
async def _deadline() -> AsyncIterator[None]:
    async with asyncio.timeout(PATIENCE_S):
        yield


def chat(name: str, **asked: object) -> Query:
    return Query(name, "12", {"shape": "alone", "position": 0, **asked})


async def reward(connected: ConnectedRun, but: Collection[str], last: float = math.inf) -> None:
    """Rewards all samples but those of the queries whose names begin with one of ``but``, and of the steps after
    ``last``, until the run ends or continues from a checkpoint."""

    def is_wanted(name: str) -> bool:
        scope, _, query = name.partition(":")
        return not query.startswith(tuple(but)) and (scope == "eval" or int(scope) <= last)

    async for samples in connected.unjudged("solver"):
        if names := [name for name in samples["sample_id"] if is_wanted(name)]:
            rewards = [float(len(name) % 2) for name in names]
            await connected.write("solver", {"sample_id": names, "reward": rewards})


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def judge(
    connected: ConnectedRun, but: Collection[str] = (), last: float = math.inf
) -> AbstractAsyncContextManager[None]:
    """A program that rewards, as ``reward``."""
    return running(reward(connected, but, last))


async def rows(connected: ConnectedRun, query: str) -> None:
    """Returns when the group of the query has its rewards, and is in the store: a step under way has it."""
    of_query = f"query = '{query}' and status <> 'writing'"
    while len(await connected.samples(of_query)) < 4:
        await asyncio.sleep(0.02)


async def event(run: flexmarl.Run, kind: str, **fields: object) -> dict[str, Any]:
    """The first event of this kind that has these fields, once it is there."""
    while True:
        for line in json_lines(run.directory.events):
            if line["event"] == kind and fields.items() <= line.items():
                return line
        await asyncio.sleep(0.02)


async def reward_through_restarts(run: Path, last: float = math.inf) -> None:
    """Rewards the samples of drawn queries, until those of step ``last``; connects again when the run continues from a
    checkpoint."""
    while True:
        with suppress(ActorDead, CallTimeout, RunUnreachable):
            async with flexmarl.connect(run, wait_s=PATIENCE_S) as program:
                await reward(program, ["chat"], last)
        await asyncio.sleep(0.1)


async def test_chats_are_answered_at_once_and_trained_when_their_rewards_come_or_are_late(
    tmp_path: Path,
) -> None:
    async with (
        run_in_loop(tmp_path, "chats", *HELD) as run,
        flexmarl.connect(run.directory.path, wait_s=PATIENCE_S) as program,
    ):
        async with judge(program, but=["chat"], last=2):
            await wait_for_step(run, 2)
        queries = [chat(f"chat-{n}") for n in range(8)]
        answers = await program.submit(queries, judged=False)
        assert [answer.query for answer in answers] == [query.id for query in queries]
        turns = [turn for answer in answers for one in answer.trajectories for turn in one.turns]
        assert len(turns) == 8 * 4 and {turn.reward for turn in turns} == {None}
        names = [turn.sample_id for turn in turns if ":chat-0_" in turn.sample_id]
        await program.write("solver", {"sample_id": names, "reward": [0.0, 1.0, 0.0, 1.0]})
        await rows(program, "chat-0")
        async with judge(program, but=["chat"]):
            late = [await event(run, "group_late", query=f"chat-{n}") for n in range(1, 8)]
            assert [line["trajectories"] for line in late] == [4] * 7
            assert all("older than max_staleness" in line["reason"] for line in late)
            too_late = [turn.sample_id for turn in turns if ":chat-1_" in turn.sample_id]
            await program.write("solver", {"sample_id": too_late, "reward": [1.0] * 4})
            assert (await event(run, "rewards_late"))["rewards"] == 4
            await run.stop()
    counts = trained(run.directory.path)
    assert set(counts.values()) == {1} and set(names) <= counts.keys()
    assert not any(":chat-" in name for name in counts.keys() - set(names))
    lines = json_lines(run.directory.metrics)
    assert sum(line["submitted_queries"] for line in lines) == 8
    assert sum(line["late_trajectories"] for line in lines) >= 7 * 4


async def test_a_program_gets_the_rewards_that_come_while_others_are_trained(tmp_path: Path) -> None:
    async with (
        run_in_loop(tmp_path, "waits", *HELD, "max_staleness=4") as run,
        flexmarl.connect(run.directory.path, wait_s=PATIENCE_S) as program,
    ):
        async with judge(program, but=["chat"], last=1):
            await wait_for_step(run, 1)
        asking = asyncio.create_task(program.submit([chat("chat-a")]))
        while len(shown := await program.samples("query = 'chat-a'")) < 4:
            await asyncio.sleep(0.02)
        async with judge(program, but=["chat"], last=4):
            await wait_for_step(run, 4)
        names = sorted(row["sample_id"] for row in shown)
        await program.write("solver", {"sample_id": names, "reward": [0.0, 0.25, 0.5, 1.0]})
        async with judge(program):
            (answer,) = await asking
            assert answer.rewards == {"solver": [0.0, 0.25, 0.5, 1.0]} and not answer.dropped
            await run.stop()
    assert {trained(run.directory.path)[name] for name in names} == {1}


async def test_without_any_reward_a_step_waits_for_the_first_one_and_names_that(tmp_path: Path) -> None:
    async with (
        run_in_loop(tmp_path, "none", *ASYNC, "training.steps=100000", "supervision.stall_s=1") as run,
        flexmarl.connect(run.directory.path, wait_s=PATIENCE_S) as program,
    ):
        async with judge(program, but=["q"]):  # evaluations alone
            while "which has no sample" not in json.dumps(lines := events(run.directory.path, "run_stalled")):
                await asyncio.sleep(0.02)
            assert "the first reward from outside for step 1, which has no sample: " in json.dumps(lines)
            assert not json_lines(run.directory.metrics)
        async with judge(program):
            await wait_for_step(run, 3)
        await run.stop()
    assert set(trained(run.directory.path).values()) == {1}


async def test_under_strict_a_step_closes_without_the_rewards_that_are_late(tmp_path: Path) -> None:
    settings = ("training.steps=2", "rollout.late_rewards_after_s=0.3", "rollout.max_failed_share=0")
    async with (
        run_in_loop(tmp_path, "closes", *SIMULATED, REWARD.format(PATIENCE_S), *settings) as run,
        flexmarl.connect(run.directory.path, wait_s=PATIENCE_S) as program,
        judge(program, but=["q"]),
    ):
        await run.wait()
    lines = json_lines(run.directory.metrics)
    assert [line["late_trajectories"] for line in lines] == [8, 8]
    assert not any(line["failed_trajectories"] for line in lines)


async def test_each_reward_is_trained_once_or_late_through_kills_of_judge_and_worker(
    launcher: Launcher,
) -> None:
    run = launcher.train("killed", *HELD, "max_staleness=4")
    async with flexmarl.connect(run.directory, wait_s=PATIENCE_S) as program:
        async with judge(program, but=["chat"], last=1):
            await asyncio.to_thread(run.wait_for_step, 1)
        answers = await program.submit([chat(f"chat-{n}") for n in range(4)], judged=False)
        names = [turn.sample_id for answer in answers for one in answer.trajectories for turn in one.turns]
        run.actors()["rollout-0"].kill()
        async with judge(program, but=["chat"], last=3):
            await asyncio.to_thread(run.wait_for_step, 3)
        await program.write("solver", {"sample_id": names, "reward": [1.0] * len(names)})
        answers = await program.submit([chat(f"chat-{n}") for n in range(4, 8)], judged=False)
        again = [turn.sample_id for answer in answers for one in answer.trajectories for turn in one.turns]
        await program.write("solver", {"sample_id": again, "reward": [0.5] * len(again)})
        for n in range(4, 8):
            await rows(program, f"chat-{n}")
        async with judge(program, but=["chat"]):
            await asyncio.to_thread(run.wait_for_step, 5)
            await program.stop()
            with suppress(ActorDead):
                await program.wait()
    assert await asyncio.to_thread(run.wait) == 130, run.text
    counts = trained(run.directory)
    assert set(counts.values()) == {1}
    late = events(run.directory, "group_late")
    lost = {f"{line['step']}:{line['query']}" for line in late if "rollout worker was lost" in line["reason"]}
    assert {name.rsplit("_", 2)[0] for name in names} <= lost and not counts.keys() & set(names)
    assert set(again) <= counts.keys()


JUDGE = """
import asyncio, json, sys
import flexmarl

run, wait_s, but, last = sys.argv[1:]

def is_wanted(name):
    scope = name.partition(":")[0]
    return but not in name and (scope == "eval" or int(scope) <= float(last))

async def main():
    async with flexmarl.connect(run, wait_s=float(wait_s)) as program:
        async for samples in program.unjudged("solver"):
            if names := [*filter(is_wanted, samples["sample_id"])]:
                rewards = [float(len(name) % 2) for name in names]
                await program.write("solver", {"sample_id": names, "reward": rewards})

asyncio.run(main())
"""


@asynccontextmanager
async def judge_process(
    run: Path, but: str, last: float = math.inf
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A judge in a process of its own, which rewards the samples of the steps until ``last``, without ``but`` in their
    names."""
    command = (sys.executable, "-P", "-c", JUDGE, str(run), str(PATIENCE_S), but, str(last))
    process = await asyncio.create_subprocess_exec(*command)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_killed_judge_costs_no_reward_of_the_chats_that_wait_and_its_absence_has_a_name(
    launcher: Launcher,
) -> None:
    """While no judge runs, the steps wait for the rewards of drawn groups. The next judge gives those, and the chats';
    it leaves one of these out until it is late."""
    patient = ("supervision.stall_s=1", f"supervision.stop_patience_s={PATIENCE_S}")
    run = launcher.train("judges", *HELD, *patient)
    async with flexmarl.connect(run.directory, wait_s=PATIENCE_S) as program:
        async with judge_process(run.directory, "chat", last=2) as first:
            await asyncio.to_thread(run.wait_for_step, 2)
            answers = await program.submit([chat(f"chat-{n}") for n in range(6)], judged=False)
            first.kill()
            await first.wait()
        assert all(len(answer.trajectories) == 4 for answer in answers), "answered without a judge"
        while "agents.solver.columns.reward.timeout_s" not in json.dumps(
            [line for line in events(run.directory, "run_stalled") if line["step"] >= 2]
        ):
            await asyncio.sleep(0.02)
        async with judge_process(run.directory, ":chat-5_") as second:
            while not any(line["query"] == "chat-5" for line in events(run.directory, "group_late")):
                await asyncio.sleep(0.02)
            await program.stop()
            assert await asyncio.to_thread(run.wait) == 130, run.text
            assert await second.wait() == 0, "it ends with the run"
    counts = trained(run.directory)
    assert set(counts.values()) == {1}
    late = {f"{line['step']}:{line['query']}" for line in events(run.directory, "group_late")}
    names = {turn.sample_id for answer in answers for one in answer.trajectories for turn in one.turns}
    groups = {name.rsplit("_", 2)[0] for name in names - counts.keys()}
    assert groups == {name for name in late if ":chat" in name}, "trained once, or late"
    assert any(":chat-" in name for name in counts), "the second judge's rewards are in time for some"


async def test_rewards_of_answers_that_a_killed_store_has_forgotten_count_as_late(
    launcher: Launcher,
) -> None:
    run = launcher.train("struck", *HELD, "checkpoint.every=2", "--restarts", "1")
    async with running(reward_through_restarts(run.directory, last=3)):
        await asyncio.to_thread(run.wait_for_step, 3)
        while not events(run.directory, "checkpoint_saved"):
            await asyncio.sleep(0.02)
        async with flexmarl.connect(run.directory) as program:
            (answer,) = await program.submit([chat("chat-before")], judged=False)
        names = [turn.sample_id for trajectory in answer.trajectories for turn in trajectory.turns]
        run.actors()["store"].kill()
        await asyncio.to_thread(run.wait_for_output, "continuing after step")
    async with running(reward_through_restarts(run.directory, last=6)):
        while run.metrics[-1]["step"] < 6:
            await asyncio.sleep(0.02)
    async with flexmarl.connect(run.directory, wait_s=PATIENCE_S) as program:
        for _ in range(2):
            await program.write("solver", {"sample_id": names, "reward": [1.0] * len(names)})
        with pytest.raises(StoreError, match="there is no sample 'another' that waits for a reward"):
            await program.write("solver", {"sample_id": ["another"], "reward": [1.0]})
        while not (
            late := [line for line in events(run.directory, "rewards_late") if line["sample"] in names]
        ):
            await asyncio.sleep(0.02)
        assert [line["rewards"] for line in late] == [len(names)], "each once"
        (again,) = await program.submit([chat("chat-after")], judged=False)
        after = [turn.sample_id for trajectory in again.trajectories for turn in trajectory.turns]
        await program.write("solver", {"sample_id": after, "reward": [0.0, 1.0, 0.0, 1.0]})
        await rows(program, "chat-after")
        async with judge(program):
            while run.metrics[-1]["step"] < 8:
                await asyncio.sleep(0.02)
            await program.stop()
            with suppress(ActorDead):
                await program.wait()
    assert await asyncio.to_thread(run.wait) == 130, run.text
    counts = trained(run.directory)
    assert set(counts.values()) == {1} and set(after) <= counts.keys() and not set(names) & counts.keys()


async def test_under_async_submitted_queries_begin_at_once_and_are_trained_with_the_workflows_rewards(
    tmp_path: Path,
) -> None:
    hold = tmp_path / "hold"
    hold.write_text("4")  # no query after those of two steps ends
    settings = [setting for setting in HELD if "columns.reward" not in setting]
    async with (
        run_in_loop(tmp_path, "own", *settings, f"data.hold={hold}") as run,
        flexmarl.connect(run.directory.path, wait_s=PATIENCE_S) as program,
    ):
        await wait_for_step(run, 2)
        answers = await program.submit([chat(f"chat-{n}") for n in range(5)])
        assert all(
            [len(rewards) for rewards in answer.rewards.values()] == [4] and not answer.dropped
            for answer in answers
        )
        hold.unlink()
        await run.stop()
    counts = trained(run.directory.path)
    names = {turn.sample_id for answer in answers for one in answer.trajectories for turn in one.turns}
    assert set(counts.values()) == {1} and len(names) == 5 * 4 and names <= counts.keys()
