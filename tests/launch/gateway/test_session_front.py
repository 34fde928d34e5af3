"""The run's gateway: keys, bodies, limits, the life of a session, and requests on their way to a worker."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from flexmarl.actors.errors import QueriesRefused
from flexmarl.actors.messages import CarriedAnswer, CarriedRequest, Query, QueryAnswer, SessionRewards
from flexmarl.actors.names import AgentName, Step
from flexmarl.actors.run_events import RewardsLate
from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.errors import ActorDead
from flexmarl.core.system import ActorSystem
from flexmarl.launch.gateway import front_app, session_front
from flexmarl.launch.gateway.front_app import application
from flexmarl.launch.gateway.gateway_config import GatewayConfig
from flexmarl.launch.gateway.served_front import ServedFront
from flexmarl.launch.gateway.session_front import SessionFront
from flexmarl.launch.gateway.session_request import SessionRequest

from ...patience import PATIENCE_S

KEY = "fm-the-key-of-services"
CALL = {"model": "solver", "messages": [{"role": "user", "content": "1="}]}
CHAT = "/v1/chat/completions"


class Orchestrator(Actor):
    """Keeps the queries that are submitted, and answers them with ``end``."""

    def __init__(self) -> None:
        self.begin: Callable[[Query], Awaitable[None]] | None = None
        self.queries: list[Query] = []
        self.cancelled = 0
        self.refusal = ""
        self._ends: dict[str, asyncio.Future[QueryAnswer]] = {}

    @endpoint(raises=[QueriesRefused])
    async def submit(
        self, queries: list[Query], judged: bool = True, *, sessions: bool = False
    ) -> list[QueryAnswer]:
        assert judged and sessions
        if self.refusal:
            raise QueriesRefused(self.refusal)
        (query,) = queries
        self.queries.append(query)
        self._ends[query.id] = asyncio.get_running_loop().create_future()
        if self.begin is not None:
            await self.begin(query)
        try:
            return [await self._ends[query.id]]
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def end(self, session: str, dropped: str = "", failures: int = 0) -> None:
        self._ends[session].set_result(QueryAnswer(session, Step(1), [], failures, dropped))


class Worker(Actor):
    """Keeps what it is asked. ``problem``: its answer to rewards. ``parts``: of its answers. ``held``: until it is set,
    an answer does not end."""

    def __init__(self) -> None:
        self.carried: list[CarriedRequest] = []
        self.settled: list[tuple[str, SessionRewards | None]] = []
        self.lost: list[str] = []
        self.problem: str | None = ""
        self.parts = [
            CarriedAnswer(status=200, headers=[("content-type", "text/plain")]),
            CarriedAnswer(b"hi"),
        ]
        self.held: asyncio.Event | None = None
        self.error: Exception | None = None
        self.sent = False
        self.ended = asyncio.Event()

    @endpoint
    async def carry(self, request: CarriedRequest) -> AsyncGenerator[CarriedAnswer]:
        self.carried.append(request)
        try:
            if self.error is not None:
                raise self.error
            for part in self.parts:
                yield part
            self.sent = True
            if self.held is not None:
                await self.held.wait()
        finally:
            self.ended.set()

    @endpoint
    async def settle_session(self, session: str, rewards: SessionRewards | None) -> str | None:
        self.settled.append((session, rewards))
        return self.problem

    @endpoint
    async def lose_sessions(self, reason: str) -> None:
        self.lost.append(reason)


class Cluster:
    """A front with its orchestrator, its worker and a client that has the key of services."""

    def __init__(self, system: ActorSystem) -> None:
        self.system = system
        self.orchestrator, self.worker = Orchestrator(), Worker()
        self.late: list[Any] = []
        self.opens = True
        """A worker opens each session at once."""

    async def start(self, **config: Any) -> None:
        orchestrator: Any = await self.system.add(self.orchestrator, "orchestrator")
        self.worker_ref: Any = await self.system.add(self.worker, "rollout-0")
        self.orchestrator.begin = self._begin

        async def find() -> Any:
            return orchestrator

        self.front = SessionFront(GatewayConfig(**config), KEY, ("solver", "judge"), find, self.late.append)
        await self.system.add(self.front, "gateway")

    async def _begin(self, query: Query) -> None:
        if self.opens:
            assert await self.front.begin_session(query.id, self.worker_ref) is not None
            assert await self.front.session_opened(query.id, f"fm-{query.id}")

    @asynccontextmanager
    async def client(self, key: str = KEY, app: Any = None) -> AsyncIterator[httpx2.AsyncClient]:
        """A client with a key, and a deadline for all that it is used for."""
        transport = httpx2.ASGITransport(app or application(self.front))
        headers = {"authorization": f"Bearer {key}"}
        async with (
            asyncio.timeout(PATIENCE_S),
            httpx2.AsyncClient(transport=transport, base_url="http://run", headers=headers) as client,
        ):
            yield client


@pytest.fixture
async def cluster(system: ActorSystem) -> Cluster:
    return Cluster(system)


@asynccontextmanager
async def session_of(
    cluster: Cluster, **config: Any
) -> AsyncIterator[tuple[httpx2.AsyncClient, dict[str, Any]]]:
    """A client of services, and an open session."""
    await cluster.start(**config)
    async with cluster.client() as service:
        response = await service.post("/sessions", json={})
        assert response.status_code == 201, response.text
        yield service, response.json()


def problem_of(response: httpx2.Response, status: int) -> str:
    assert response.status_code == status, response.text
    message: str = response.json()["error"]["message"]
    return message


async def test_a_session_is_opened_played_and_rewarded(cluster: Cluster) -> None:
    async with session_of(cluster) as (service, session):
        place = f"/sessions/{session['id']}"
        assert session["url"] == f"http://run{place}"
        assert (await service.get(place)).json()["state"] == "open"
        async with cluster.client(session["key"]) as program:
            for path in (place + CHAT, CHAT):
                answer = await program.post(
                    path, json=CALL, headers={"cookie": "secret", "anthropic-version": "1"}
                )
                assert (answer.status_code, answer.text) == (200, "hi")
                assert answer.headers["content-type"] == "text/plain"
            carried = cluster.worker.carried[-1]
            assert (carried.method, carried.path) == ("POST", place + CHAT)
            assert {name for name, _ in carried.headers} == {
                "content-type",
                "anthropic-version",
                "authorization",
            }
            rewarding = asyncio.create_task(service.post(f"{place}/rewards", json={"team": 1}))
            while not cluster.worker.settled:
                await asyncio.sleep(0)
            while (await service.get(place)).json()["state"] != "ending":
                await asyncio.sleep(0)
            again = await service.post(f"{place}/rewards", json={"team": 1})
            assert "already" in problem_of(again, 409)
            assert "rewards are taken" in problem_of(await program.post(CHAT, json=CALL), 410)
            cluster.orchestrator.end(session["id"])
            assert (await rewarding).json()["state"] == "rewarded"
            assert "rewarded" in problem_of(await program.post(CHAT, json=CALL), 410)
        assert "rewarded" in problem_of(await service.post(f"{place}/rewards", json={"team": 1}), 410)
    assert cluster.worker.settled == [(session["id"], SessionRewards(team=1.0))]
    assert not cluster.late, "its first rewards are trained"


@pytest.mark.parametrize(
    ("dropped", "failures", "state"),
    [
        ("", 0, "rewarded"),
        ("expired: no rewards within 3 s", 0, "expired"),
        ("closed: by it", 0, "closed"),
        ("lost: its worker", 0, "lost"),
        ("late: too old", 0, "late"),
        ("all failed", 1, "failed"),
    ],
)
async def test_the_state_of_a_session_is_its_fate(
    cluster: Cluster, dropped: str, failures: int, state: str
) -> None:
    async with session_of(cluster) as (service, session):
        cluster.orchestrator.end(session["id"], dropped, failures)
        place = f"/sessions/{session['id']}"
        while (answer := (await service.get(place)).json())["state"] == "open":
            await asyncio.sleep(0)
        assert answer["state"] == state
        assert state in problem_of(await service.delete(place), 410)
        for _ in range(2):
            rewards = await service.post(f"{place}/rewards", json={"agents": {"judge": 1}})
            assert state in problem_of(rewards, 410)
        late = [] if state in ("rewarded", "late") else [RewardsLate(AgentName("judge"), 1, session["id"])]
        assert cluster.late == late, "they are counted once"


async def test_rewards_that_come_while_the_session_ends_are_late(cluster: Cluster) -> None:
    async with session_of(cluster) as (service, session):
        cluster.worker.problem = None
        rewarding = asyncio.create_task(service.post(f"/sessions/{session['id']}/rewards", json={"team": 1}))
        while not cluster.worker.settled:
            await asyncio.sleep(0)
        cluster.orchestrator.end(session["id"], "expired: 3 s")
        assert "expired" in problem_of(await rewarding, 410)
        assert len(cluster.late) == 2


async def test_a_session_whose_end_is_not_known_yet_has_no_rewards(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_front, "_TRAINED_WITHIN_S", 0.01)
    async with session_of(cluster) as (service, session):
        cluster.worker.problem = None
        answer = await service.post(f"/sessions/{session['id']}/rewards", json={"team": 1})
        assert problem_of(answer, 410).endswith("has ended, and how is not known yet")
        assert len(cluster.late) == 2


async def test_a_run_that_stops_ends_the_open_sessions_of_its_workers(cluster: Cluster) -> None:
    async with session_of(cluster, stop_s=0.01) as (service, session):
        await cluster.front.run_stops()
        while not cluster.worker.lost:
            await asyncio.sleep(0.001)
        cluster.orchestrator.end(session["id"], f"lost: {cluster.worker.lost[0]}")
        place = f"/sessions/{session['id']}"
        while (answer := (await service.get(place)).json())["state"] == "open":
            await asyncio.sleep(0)
        assert (answer["state"], answer["reason"]) == ("lost", "the run is being stopped")
        assert len(cluster.worker.lost) == 1
        cluster.opens = False
        opening = asyncio.create_task(service.post("/sessions", json={}))
        while len(cluster.orchestrator.queries) < 2:
            await asyncio.sleep(0)
        assert (
            await cluster.front.begin_session(cluster.orchestrator.queries[-1].id, cluster.worker_ref) is None
        )
        opening.cancel()
        await asyncio.wait([opening])


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b"[", "JSON"),
        (b"[]", "the body"),
        (b'{"models": {"gpt": "nobody"}}', "there is: solver, judge"),
        (b'{"models": 3}', "models"),
        (b'{"train": "none"}', "train"),
        (b'{"train": {"judge2": "main"}}', "'judge2'"),
        (b'{"lives_s": 0}', "lives_s"),
        (b'{"lives_s": NaN}', "lives_s"),
        (b'{"lives_s": 99}', "gateway.session_s=60"),
        (b'{"metadata": []}', "metadata"),
        (b'{"metadata": {"n": 1180591620717411303424}}', "metadata"),
        (b'{"metadata": {"a": ' + b"[" * 50 + b"]" * 50 + b"}}", "metadata"),
        (b'{"key": "mine"}', "key"),
        (b"\xff", "JSON"),
    ],
)
async def test_a_body_that_opens_nothing_is_refused_with_the_key_at_fault(
    cluster: Cluster, body: bytes, place: str
) -> None:
    await cluster.start(session_s=60)
    async with cluster.client() as service:
        assert place in problem_of(await service.post("/sessions", content=body), 422)
    assert not cluster.orchestrator.queries


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b"", "no rewards"),
        (b'{"metrics": {"a": 1}}', "no rewards"),
        (b'{"agents": {"solver": NaN}}', "agents.solver"),
        (b'{"agents": {"solver": Infinity}}', "agents.solver"),
        (b'{"agents": {"solver": 1e999}}', "agents.solver"),
        (b'{"agents": {"solver": true}}', "agents.solver"),
        (b'{"team": "1"}', "team"),
        (b'{"turns": [{"turn": true, "reward": 1}]}', "turns.0.turn"),
        (b'{"turns": [{"reward": 1}]}', "turns.0.turn"),
        (b'{"reward": 1}', "reward"),
    ],
)
async def test_a_body_without_rewards_is_refused_and_the_session_stays_open(
    cluster: Cluster, body: bytes, place: str
) -> None:
    async with session_of(cluster) as (service, session):
        path = f"/sessions/{session['id']}/rewards"
        assert place in problem_of(await service.post(path, content=body), 422)
        cluster.worker.problem = "the session has no turn"
        assert problem_of(await service.post(path, json={"team": 1}), 422) == "the session has no turn"
        assert (await service.get(f"/sessions/{session['id']}")).json()["state"] == "open"


async def test_other_keys_do_nothing(cluster: Cluster) -> None:
    async with session_of(cluster) as (service, session):
        place = f"/sessions/{session['id']}"
        for wrong in ("", "wrong", session["key"], KEY[:-1], "\xe4"):
            headers = {b"authorization": f"Bearer {wrong}".encode("latin-1")}
            for answer in (
                await service.post("/sessions", json={}, headers=headers),
                await service.get(place, headers=headers),
                await service.delete(place, headers=headers),
                await service.post(f"{place}/rewards", json={"team": 1}, headers=headers),
                await service.get("/other", headers=headers),
            ):
                assert "gateway.key_file" in problem_of(answer, 401)
        for wrong in ("", "wrong", KEY):
            headers = {b"authorization": f"Bearer {wrong}".encode()}
            assert "no session" in problem_of(await service.post(CHAT, json=CALL, headers=headers), 401)
            answer = await service.post(place + CHAT, json=CALL, headers=headers)
            assert problem_of(answer, 401) == f"the key is not the one of session {session['id']}"
            assert session["key"] not in answer.text
    assert not cluster.worker.carried and not cluster.worker.settled


async def test_unknown_sessions_and_paths(cluster: Cluster) -> None:
    async with session_of(cluster) as (service, session):
        for path in ("/sessions/none", "/sessions/"):
            assert problem_of(await service.get(path), 404)
        assert "not served" in problem_of(await service.patch(f"/sessions/{session['id']}"), 404)
        assert "another life" in problem_of(await service.get("/sessions/ffffff-0123456789abcdef"), 410)


async def test_the_number_of_sessions_and_sizes_are_bounded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_app, "MOST_BODY_BYTES", 2000)
    async with session_of(cluster, max_sessions=1) as (service, session):
        assert "gateway.max_sessions=1" in problem_of(await service.post("/sessions", json={}), 429)
        big = b" " * (1 << 20) + b"{}"
        assert "1 MiB" in problem_of(await service.post("/sessions", content=big), 413)
        headers = {"authorization": f"Bearer {session['key']}"}
        assert problem_of(await service.post(CHAT, content=b" " * 2001, headers=headers), 413)
        monkeypatch.setattr(front_app, "_MOST_CARRIED", 0)
        assert "0 requests are under way" in problem_of(
            await service.post(CHAT, json=CALL, headers=headers), 429
        )
        cluster.orchestrator.end(session["id"])
        while (await service.get(f"/sessions/{session['id']}")).json()["state"] == "open":
            await asyncio.sleep(0)
        assert (await service.post("/sessions", json={})).status_code == 201


async def test_a_session_that_no_worker_begins_is_refused_and_withdrawn(cluster: Cluster) -> None:
    cluster.opens = False
    await cluster.start(open_timeout_s=0.05)
    async with cluster.client() as service:
        while not cluster.orchestrator.queries:  # on a busy machine it is withdrawn before it is there
            refused = await service.post("/sessions", json={})
            assert "within 0.05 s" in problem_of(refused, 503)
            assert refused.headers["retry-after"] == "1"
        while not cluster.orchestrator.cancelled:
            await asyncio.sleep(0.01)
        query = cluster.orchestrator.queries[0]
        assert await cluster.front.begin_session(query.id, cluster.worker_ref) is None
        assert not await cluster.front.session_opened(query.id, "fm-late")
        cluster.orchestrator.refusal = "the run is being stopped"
        assert "being stopped" in problem_of(await service.post("/sessions", json={}), 503)


async def test_a_session_whose_service_has_gone_is_closed(cluster: Cluster) -> None:
    cluster.opens = False
    await cluster.start()
    opening = asyncio.create_task(cluster.front.open(SessionRequest()))
    async with asyncio.timeout(PATIENCE_S):
        while not cluster.orchestrator.queries:
            await asyncio.sleep(0)
        (query,) = cluster.orchestrator.queries
        await cluster.front.begin_session(query.id, cluster.worker_ref)
        await cluster.front.session_opened(query.id, "fm-one")
        opening.cancel()
        while not cluster.worker.settled:
            await asyncio.sleep(0)
    assert cluster.worker.settled == [(query.id, None)]
    cluster.orchestrator.end(query.id, "closed: by its service")


async def test_a_session_that_a_second_worker_gets_is_lost(cluster: Cluster) -> None:
    async with session_of(cluster) as (service, session):
        assert await cluster.front.begin_session(session["id"], cluster.worker_ref) is None
        state = (await service.get(f"/sessions/{session['id']}")).json()
        assert (state["state"], state["reason"]) == ("lost", "its rollout worker was lost")


async def test_a_worker_that_is_lost_ends_its_sessions(cluster: Cluster) -> None:
    async with session_of(cluster) as (service, session):
        await cluster.system.remove("rollout-0")
        headers = {"authorization": f"Bearer {session['key']}"}
        asked = await service.post(CHAT, json=CALL, headers=headers)
        assert "lost: its rollout worker was lost" in problem_of(asked, 410)
        rewards = await service.post(f"/sessions/{session['id']}/rewards", json={"team": 1})
        assert "its rollout worker was lost" in problem_of(rewards, 410)
        assert len(cluster.late) == 2


async def test_an_answer_whose_worker_is_lost_in_mid_stream_is_not_whole(cluster: Cluster) -> None:
    async with session_of(cluster) as (service, session):
        cluster.worker.held = asyncio.Event()
        headers = {"authorization": f"Bearer {session['key']}"}
        asking = asyncio.create_task(service.post(CHAT, json=CALL, headers=headers))
        while not cluster.worker.sent:
            await asyncio.sleep(0)
        await cluster.system.remove("rollout-0")
        with pytest.raises(ActorDead):  # the server ends the connection
            await asking
        assert (await service.get(f"/sessions/{session['id']}")).json()["state"] == "lost"


async def test_a_worker_that_fails_a_call_is_named(cluster: Cluster) -> None:
    async with session_of(cluster) as (service, session):
        cluster.worker.error = ValueError("odd")
        headers = {"authorization": f"Bearer {session['key']}"}
        asked = await service.post("/v1/messages", json=CALL, headers=headers)
        assert "odd" in problem_of(asked, 502)
        assert asked.json()["type"] == "error", "in the form of the API"


async def test_a_program_that_goes_ends_its_request_at_the_worker(cluster: Cluster) -> None:
    async with session_of(cluster) as (_, session):
        cluster.worker.held = asyncio.Event()
        gone = asyncio.Event()
        sent: list[Any] = []
        bodies = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

        async def receive() -> Any:
            if (body := next(bodies, None)) is None:
                await gone.wait()
                return {"type": "http.disconnect"}
            return body

        async def send(message: Any) -> None:
            sent.append(message)
            if message.get("body"):
                gone.set()

        headers = [(b"x-api-key", session["key"].encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/messages", "headers": headers}
        await application(cluster.front)(scope, receive, send)
        await cluster.worker.ended.wait()
        assert [message.get("body") for message in sent] == [None, b"hi"]


async def test_agents_that_are_served_have_no_sessions(cluster: Cluster) -> None:
    await cluster.start()

    async def worker() -> Any:
        return cluster.worker_ref

    async with cluster.client(app=application(ServedFront(KEY, [worker], 9.0))) as client:
        assert (await client.post(CHAT, json=CALL)).text == "hi"
        assert cluster.worker.carried[0].path == CHAT
        assert KEY not in str(cluster.worker.carried[0].headers)
        for answer in (
            await client.post("/sessions", json={}),
            await client.post(f"/sessions/a{CHAT}", json=CALL),
        ):
            assert "without sessions" in problem_of(answer, 409)
        for path in (CHAT, "/sessions"):
            assert problem_of(await client.post(path, json=CALL, headers={"authorization": "Bearer x"}), 401)


async def test_a_worker_that_does_not_start_is_named(cluster: Cluster) -> None:
    async def worker() -> Any:
        await asyncio.Event().wait()

    async with cluster.client(app=application(ServedFront(KEY, [worker], 0.01))) as client:
        assert "has started yet" in problem_of(await client.post(CHAT, json=CALL), 503)
