"""The versions of a session's turns: the rollout actor, a gateway, and instances whose weights change meanwhile.

In real time: a gateway has real sockets.
"""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from flexmarl.actors.messages import Query, Sample
from flexmarl.actors.rollout.rollout_config import SamplingConfig
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire.memory import MemoryNetwork
from flexmarl.transport.state import StateTransport

from ...patience import PATIENCE_S
from .fake_cluster import start_step
from .test_partial_rollouts import TRAJECTORIES, FakeCluster

ENGINE = {"median_tokens": 4, "token_s": 1e-4, "prompt_share": 0.0}
WORKFLOW = """
import asyncio
import httpx2
from flexmarl.actors import Rewards, open_gateway

under_way = 0
in_the_middle, resumes = asyncio.Event(), asyncio.Event()


async def workflow(query, agents):
    '''Two turns, a pause, and two further ones.'''
    global under_way
    async with (
        open_gateway(agents) as gateway,
        httpx2.AsyncClient(base_url=gateway.env["OPENAI_BASE_URL"], timeout=600) as client,
    ):
        messages = []
        for number in range(4):
            messages.append({"role": "user", "content": f"{number}?"})
            body = {"model": "solver", "messages": messages}
            reply = await client.post(
                "chat/completions", json=body, headers={"Authorization": f"Bearer {gateway.key}"}
            )
            messages.append(reply.json()["choices"][0]["message"])
            if number == 1:
                under_way += 1
                in_the_middle.set()
                await resumes.wait()
        assert gateway.counts == {"begun": 1, "merged": 3}
    return Rewards(solver=1.0)


def train_query(position, seed): ...
def eval_queries(seed): ...
"""


def play(case: Callable[[FakeCluster, Any], Awaitable[None]], folder: Path) -> None:
    """``case`` gets the cluster, whose instance serves version 0, and the module of the workflow."""

    async def main() -> None:
        wire = MemoryNetwork().wire("node")
        async with (
            asyncio.timeout(PATIENCE_S),
            ActorSystem("node", folder, wire=wire) as system,
            StateTransport(folder) as transport,
        ):
            cluster = FakeCluster(folder, system, transport)
            await cluster.open(1, ENGINE, SamplingConfig(max_new_tokens=16), workflow=WORKFLOW)
            await cluster.update(0)
            await case(cluster, cluster.rollout._recipe._module)

    asyncio.run(main())


def by_session(samples: list[Sample]) -> list[list[Sample]]:
    """The samples of each trajectory, in the order of its turns."""
    sessions: dict[str, list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: int(sample.sample_id.split("_")[-2])):
        sessions.setdefault(sample.sample_id.rpartition("_")[2], []).append(sample)
    assert len(sessions) == TRAJECTORIES and all(len(turns) == 4 for turns in sessions.values())
    return [*sessions.values()]


def test_a_strict_session_has_the_version_of_its_step(tmp_path: Path) -> None:
    async def case(cluster: FakeCluster, module: Any) -> None:
        module.resumes.set()
        for step, version in ((1, 0), (2, 1)):
            await cluster.update(version)
            await start_step(
                cluster.rollout, step, [Query("q", "")], TRAJECTORIES, {"solver": version}, allow_newer=False
            )
            group = await cluster.group()
            assert not group.failures
            samples = [sample for sample in cluster.sink.samples if sample.step == step]
            for session in by_session(samples):
                assert {token for turn in session for token in turn.token_versions} == {version}

    play(case, tmp_path)


def test_each_turn_of_a_session_that_spans_a_publish_has_its_own_version(tmp_path: Path) -> None:
    async def case(cluster: FakeCluster, module: Any) -> None:
        await cluster.start(allow_newer=True)
        while module.under_way < TRAJECTORIES:
            module.in_the_middle.clear()
            await module.in_the_middle.wait()
        await cluster.update(1)
        module.resumes.set()
        assert not (await cluster.group()).failures
        for session in by_session(cluster.sink.samples):
            assert [turn.policy_version for turn in session] == [0, 0, 1, 1]
            assert not any(turn.version_changes for turn in session)
            for before, after in pairwise(session):
                tokens = before.prompt_tokens + before.tokens
                assert after.prompt_tokens[: len(tokens)] == tokens, "it continues another version's tokens"

    play(case, tmp_path)


def test_no_turn_of_a_session_is_older_than_the_step_allows(tmp_path: Path) -> None:
    async def case(cluster: FakeCluster, module: Any) -> None:
        module.resumes.set()
        await start_step(cluster.rollout, 3, [Query("q", "")], TRAJECTORIES, {"solver": 2}, allow_newer=True)
        while "no instance" not in str(cluster.rollout.waits()):
            await asyncio.sleep(0.01)
        assert module.under_way == 0
        await cluster.update(1)
        await cluster.update(2)
        assert not (await cluster.group()).failures
        for session in by_session(cluster.sink.samples):
            assert {turn.policy_version for turn in session} == {2}

    play(case, tmp_path)
