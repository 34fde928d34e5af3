"""Sessions of services in a rollout worker: opened, played by requests that the gateway carries, rewarded, ended."""

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.columns.declared_columns import Column
from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import (
    CarriedRequest,
    CarrierApi,
    SessionRewards,
    SessionsApi,
    SessionTerms,
    SessionTurnReward,
)
from flexmarl.actors.rollout.rollout import Rollout
from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem

from ...patience import PATIENCE_S
from .fake_cluster import QUERY, SOLVER, FakeCluster, serve, start_step

NO_WORKFLOW = "raise AssertionError"
ONE = SessionRewards(agents={"solver": 1.0})


class Front(Actor, SessionsApi):
    """Stands for the run's gateway. ``terms``: None for a session that is no longer wanted."""

    def __init__(self) -> None:
        self.terms: SessionTerms | None = SessionTerms({"gpt": "solver"}, 3600.0)
        self.wanted = True
        self.on_opened: Callable[[], None] = lambda: None
        self._keys: asyncio.Queue[str] = asyncio.Queue()

    async def opened(self) -> str:
        """The key of the session, once it is open."""
        return await asyncio.wait_for(self._keys.get(), PATIENCE_S)

    @endpoint
    async def begin_session(self, session: str, worker: ActorRef[CarrierApi]) -> SessionTerms | None:
        return self.terms

    @endpoint
    async def session_opened(self, session: str, key: str) -> bool:
        self._keys.put_nowait(key)
        self.on_opened()
        return self.wanted

    @endpoint
    async def run_stops(self) -> None:
        pass


@pytest.fixture
async def front(system: ActorSystem) -> Front:
    return Front()


@pytest.fixture
async def cluster(system: ActorSystem, tmp_path: Path, front: Front) -> FakeCluster:
    cluster = FakeCluster(system, tmp_path)
    cluster.gateway = await system.add(front, "gateway")
    cluster.credit = {"solver": CreditConfig(name="dr_grpo", rewards="both")}
    return cluster


async def begun(cluster: FakeCluster, body: str = NO_WORKFLOW) -> Rollout:
    rollout = await cluster.open(body)
    for policy in ("solver", "judge"):
        await serve(rollout, policy, 0)
    await start_step(
        rollout, 1, [QUERY], 4, {"solver": 0, "judge": 0}, submitted=[QUERY.id], sessions=[QUERY.id]
    )
    return rollout


async def ask(rollout: Rollout, key: str, prompt: str = "2+2", model: str = "gpt") -> tuple[int, Any]:
    """A request for the completion of a text. Returns the status and the body of the answer."""
    content = json.dumps({"model": model, "prompt": prompt}).encode()
    headers = [("authorization", f"Bearer {key}")]
    path = f"/sessions/{QUERY.id}/v1/completions"
    async with aclosing(rollout.carry(CarriedRequest("POST", path, headers, content))) as parts:
        received = [part async for part in parts]
    return received[0].status, json.loads(b"".join(part.body for part in received))


async def test_a_session_is_one_trajectory_that_its_calls_and_rewards_make(
    cluster: FakeCluster, front: Front
) -> None:
    rollout = await begun(cluster)
    key = await front.opened()
    status, answer = await ask(rollout, key)
    assert status == 200, answer
    assert (await ask(rollout, key, model="judge"))[0] == 200
    rewards = SessionRewards({"judge": 0.5}, 1.0, [SessionTurnReward(answer["id"], 0.25)], {"stars": 4.0})
    assert await rollout.settle_session(QUERY.id, rewards) == ""
    group = await cluster.closed()
    assert (group.samples[SOLVER], group.dropped, group.metrics) == (1, "", {"stars": [4.0]})
    assert len(group.trajectories) == 1
    assert [turn.reward for turn in group.trajectories[0].turns] == [1.25, 1.5]
    assert await rollout.settle_session(QUERY.id, rewards) is None, "it has ended"
    assert (await ask(rollout, key))[0] == 410


@pytest.mark.parametrize(
    ("rewards", "problem"),
    [
        (SessionRewards({"nobody": 1.0}), "nobody"),
        (SessionRewards({"metrics": 1.0}), "metrics"),
        (SessionRewards({"self": 1.0}), "self"),
        (SessionRewards({"judge": 1.0}), "no reward"),
        (SessionRewards(team=float("nan")), "nan"),
        (SessionRewards({"solver": 1e300}), "1e+300"),
        (SessionRewards({"solver": 1.0}, turns=[SessionTurnReward(1, 1.0)]), "1 turns that have ended"),
        (SessionRewards({"solver": 1.0}, turns=[SessionTurnReward(-1, 1.0)]), "numbered from 0"),
        (SessionRewards({"solver": 1.0}, turns=[SessionTurnReward("cmpl-other", 1.0)]), "cmpl-other"),
        (SessionRewards({"solver": 1.0}, metrics={"x": float("inf")}), "inf"),
    ],
)
async def test_rewards_that_no_trajectory_may_have_are_refused_and_the_session_stays_open(
    cluster: FakeCluster, front: Front, rewards: SessionRewards, problem: str
) -> None:
    rollout = await begun(cluster)
    key = await front.opened()
    assert "no turn that has ended" in str(await rollout.settle_session(QUERY.id, ONE))
    await ask(rollout, key)
    assert problem in str(await rollout.settle_session(QUERY.id, rewards))
    assert (await ask(rollout, key))[0] == 200
    assert await rollout.settle_session(QUERY.id, ONE) == ""
    assert (await cluster.closed()).samples[SOLVER] == 2


async def test_an_answer_with_two_choices_names_no_turn(cluster: FakeCluster, front: Front) -> None:
    rollout = await begun(cluster)
    key = await front.opened()
    content = json.dumps({"model": "solver", "prompt": "1+1", "n": 2}).encode()
    headers = [("authorization", f"Bearer {key}")]
    request = CarriedRequest("POST", f"/sessions/{QUERY.id}/v1/completions", headers, content)
    parts = [part async for part in rollout.carry(request)]
    answer = json.loads(b"".join(part.body for part in parts))
    by_id = SessionRewards({"solver": 1.0}, turns=[SessionTurnReward(answer["id"], 1.0)])
    assert "has 2 choices" in str(await rollout.settle_session(QUERY.id, by_id))
    by_number = SessionRewards({"solver": 1.0}, turns=[SessionTurnReward(1, 1.0)])
    assert await rollout.settle_session(QUERY.id, by_number) == ""
    assert sorted(turn.reward or 0 for turn in (await cluster.closed()).trajectories[0].turns) == [1.0, 2.0]


async def test_turns_that_the_service_does_not_train_need_no_reward(
    cluster: FakeCluster, front: Front
) -> None:
    front.terms = SessionTerms({}, 3600.0, {"solver": "main"})
    rollout = await begun(cluster)
    key = await front.opened()
    _, first = await ask(rollout, key, "a", "solver")
    await ask(rollout, key, "a title", "solver")
    await ask(rollout, key, f"a{first['choices'][0]['text']}b", "solver")
    assert await rollout.settle_session(QUERY.id, ONE) == ""
    group = await cluster.closed()
    assert (group.samples[SOLVER], group.figures["gateway_masked"]) == (2, 1)


async def test_a_session_without_rewards_is_late_and_counted_by_its_fate(
    cluster: FakeCluster, front: Front
) -> None:
    rollout = await begun(cluster)
    await ask(rollout, await front.opened())
    assert await rollout.settle_session(QUERY.id, None) == ""
    group = await cluster.closed()
    assert (group.dropped.partition(":")[0], group.failures) == ("closed", [])
    assert (group.figures["closed_sessions"], group.figures["late_trajectories"]) == (1, 1)


async def test_a_session_expires(cluster: FakeCluster, front: Front) -> None:
    front.terms = SessionTerms({}, 0.05)
    rollout = await begun(cluster)
    await front.opened()
    group = await cluster.closed()
    assert group.dropped == "expired: no rewards within 0.05 s"
    assert group.figures["expired_sessions"] == 1
    assert await rollout.settle_session(QUERY.id, ONE) is None


async def test_the_open_session_of_a_run_that_stops_is_lost(cluster: FakeCluster, front: Front) -> None:
    rollout = await begun(cluster)
    assert (await ask(rollout, await front.opened()))[0] == 200
    await rollout.lose_sessions("the run is being stopped")
    assert (await cluster.closed()).dropped == "lost: the run is being stopped"
    assert await rollout.settle_session(QUERY.id, ONE) is None


async def test_rewards_that_are_taken_in_the_moment_of_the_expiry_count(
    cluster: FakeCluster, front: Front
) -> None:
    lives_s, answers = 60.0, list[str | None]()
    front.terms = SessionTerms({"gpt": "solver"}, lives_s)

    def settle_at_its_end() -> None:
        # Before the session's own timer, and in virtual time due with it: both run in one turn of the loop.
        loop = asyncio.get_running_loop()
        loop.call_later(lives_s, lambda: answers.append(rollout._sessions.settle(QUERY.id, ONE)))

    front.on_opened = settle_at_its_end
    rollout = await begun(cluster)
    assert (await ask(rollout, await front.opened()))[0] == 200
    assert (await cluster.closed()).dropped == ""
    assert answers == [""]


@pytest.mark.parametrize("when", ["before it begins", "before it can be asked"])
async def test_a_session_that_no_service_waits_for_ends_at_once(
    cluster: FakeCluster, front: Front, when: str
) -> None:
    if when == "before it begins":
        front.terms = None
    front.wanted = False
    await begun(cluster)
    group = await cluster.closed()
    assert (group.dropped.partition(":")[0], group.figures["lost_sessions"]) == ("lost", 1)


async def test_a_session_with_a_failed_call_takes_no_rewards_and_fails_alone(
    cluster: FakeCluster, front: Front
) -> None:
    def fail(request: Any) -> tuple[int, ...]:
        raise ValueError("no memory")

    for instance in cluster.instances["solver"]:
        instance._answer = fail
    rollout = await begun(cluster)
    status, answer = await ask(rollout, await front.opened())
    assert status == 500 and "no memory" in answer["error"]["message"]
    assert "no memory" in str(await rollout.settle_session(QUERY.id, ONE))
    group = await cluster.closed()
    assert len(group.failures) == 1 and "no memory" in group.failures[0].error


async def test_a_session_waits_with_a_sentence(cluster: FakeCluster, front: Front) -> None:
    rollout = await begun(cluster)
    await front.opened()
    async with asyncio.timeout(PATIENCE_S):
        while not (waits := [wait for wait in rollout.waits() if "lives_s" in wait.limit]):
            await asyncio.sleep(0.01)
    assert (
        waits[0].text == f"1 trajectory (1:{QUERY.id}_0) in a session of a service, without a call or rewards"
    )
    assert waits[0].limit == "its lives_s=3600 ends it"


async def test_a_judge_outside_gives_the_rewards_of_a_session_that_is_closed(
    cluster: FakeCluster, front: Front
) -> None:
    reward = Column(type="float", required=True, written_by="external", timeout_s=0.05)
    cluster.columns = {"solver": {"reward": reward}}
    rollout = await begun(cluster)
    await ask(rollout, await front.opened())
    assert await rollout.settle_session(QUERY.id, None) == ""
    group = await cluster.closed()
    assert "closed" not in group.dropped, "the judge had its time"


async def test_served_agents_answer_without_a_session(cluster: FakeCluster) -> None:
    cluster.serves = True
    rollout = await cluster.open(NO_WORKFLOW)
    for policy in ("solver", "judge"):
        await serve(rollout, policy, 0)
    content = json.dumps({"model": "solver", "prompt": "1+1", "max_tokens": 10**9, "temperature": 0}).encode()
    answers = []
    for _ in range(2):
        request = CarriedRequest("POST", "/v1/completions", [], content)
        parts = [part async for part in rollout.carry(request)]
        assert parts[0].status == 200, parts[1].body
        answers.append(json.loads(b"".join(part.body for part in parts)))
    assert answers[0]["id"] != answers[1]["id"]
    asked = [request for instance in cluster.instances["solver"] for request in instance.asked]
    assert len({request.seed for request in asked}) == 2 and {request.temperature for request in asked} == {0}
