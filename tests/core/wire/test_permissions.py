"""The calls that a client of an allow-list may make."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.errors import CallNotAllowed
from flexmarl.core.supervision.system_api import SystemApi
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire.curve import Keys
from flexmarl.core.wire.permissions import DEFAULT_CALLS, checked_calls, may_call
from flexmarl.core.wire.zeromq import Tcp


class Subject(Actor):
    def __init__(self) -> None:
        self.heard: list[int] = []

    @endpoint
    async def ask(self, number: int) -> int:
        return number

    @endpoint
    async def ask_again(self, number: int) -> int:
        return number

    @endpoint
    async def hear(self, number: int) -> None:
        self.heard.append(number)

    @endpoint
    async def count(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number


@pytest.mark.parametrize(
    ("calls", "allowed", "refused"),
    [
        (DEFAULT_CALLS, ["a:f", "b:g"], ["system:stop", "system:lookup"]),
        (["a"], ["a:f", "a:g"], ["b:f", "ab:f", "system:stop"]),
        (["a:f", "system:lookup"], ["a:f", "system:lookup"], ["a:g", "a:ff", "system:stop"]),
        (["system"], ["system:stop"], ["a:f"]),
        (["*", "system"], ["system:stop", "a:f"], []),
        ([], [], ["a:f", "system:stop"]),
    ],
)
def test_rules(calls: list[str], allowed: list[str], refused: list[str]) -> None:
    rules = checked_calls(calls)
    assert all(may_call(rules, *call.split(":")) for call in allowed)
    assert not any(may_call(rules, *call.split(":")) for call in refused)


@pytest.mark.parametrize("calls", ["a", ["a:"], [":f"], ["a:*"], ["a b"], ["a:f:g"], ["*:f"], [""]])
def test_invalid_rules_are_refused(calls: list[str]) -> None:
    with pytest.raises(ValueError, match="rule|name"):
        checked_calls(calls)


@asynccontextmanager
async def run_and_client(directory: Path) -> AsyncIterator[tuple[ActorSystem, ActorSystem, str]]:
    """A run, a client from outside that it does not admit yet, and the client's key."""
    async with ActorSystem("run", tcp=Tcp(), log_directory=directory) as run:
        assert run.keys is not None
        keys = Keys.for_client(run.keys.server_public)
        async with ActorSystem("client", keys=keys) as client:
            yield run, client, keys.client_public


async def test_a_client_may_call_all_actors_and_not_the_system_itself(tmp_path: Path) -> None:
    async with run_and_client(tmp_path) as (run, client, key):
        await run.add(Subject(), "subject")
        await run.allow(key)
        await client.connect(run.address)
        assert await client.ref("subject", run.address, Subject).api.ask(3) == 3
        system = client.ref("system", run.address, SystemApi)
        for call in (
            system.api.stop(), system.api.process_statistics(), system.api.process_waits(),
            system.api.allow(Keys.make().client_public, ("*", "system")),
        ):  # fmt: skip
            with pytest.raises(CallNotAllowed, match=r'"system:\w+".*ActorSystem.allow'):
                await call
        with pytest.raises(CallNotAllowed) as caught:
            await client.lookup("subject", Subject)
        assert (caught.value.actor, caught.value.endpoint) == ("system", "lookup")
        assert not run._system_actor.stop_requested.is_set()
        await run.allow(key, ["*", "system:lookup"])
        subject = await client.lookup("subject", Subject)
        assert await subject.api.ask(4) == 4
        with pytest.raises(CallNotAllowed):
            await system.api.stop()


async def test_rules_hold_for_requests_of_every_kind_and_change_at_once(tmp_path: Path) -> None:
    async with run_and_client(tmp_path) as (run, client, key):
        actor = Subject()
        await run.add(actor, "subject")
        await run.allow(key, ["subject:ask"])
        subject = client.ref("subject", run.address, Subject)
        with structlog.testing.capture_logs() as lines:
            assert await subject.api.ask(1) == 1
            with pytest.raises(CallNotAllowed, match="subject.ask_again: this client may not call it"):
                await subject.api.ask_again(1)
            with pytest.raises(CallNotAllowed):
                async for _ in subject.api.count(3):
                    pass
            for number in range(100):
                await subject.tell("hear", number)
            results = await asyncio.gather(
                *(subject.api.ask_again(number) for number in range(100)), return_exceptions=True
            )
            assert {type(result) for result in results} == {CallNotAllowed}
        refused = [line for line in lines if line["event"].startswith("call refused")]
        assert 2 <= len(refused) <= 10, "logged at a bounded rate"
        assert refused[0]["endpoint"] == "ask_again" and "subject:ask_again" in refused[0]["next"]
        assert await subject.api.ask(2) == 2 and actor.heard == []
        requests = client._local.network.connection(run.address).session.requests
        assert requests.credit("subject").requests == 0, "refused requests give their credit back"
        await run.allow(key, ["subject"])
        assert await subject.api.ask_again(5) == 5
        await run.allow(key, [])
        with pytest.raises(CallNotAllowed):
            await subject.api.ask(6)


async def test_rules_hold_in_the_processes_of_the_system_which_themselves_may_make_all_calls(
    tmp_path: Path,
) -> None:
    async with run_and_client(tmp_path) as (run, client, key):
        early = await run.spawn(Subject, "early", process=True)
        await run.allow(key, ["early:ask", "late:ask"])
        late = await run.spawn(Subject, "late", process=True)
        for subject in (early, late):
            assert await subject.api.ask_again(1) == 1
            outside = client.ref(subject.name, subject.address, Subject)
            assert await outside.api.ask(2) == 2
            with pytest.raises(CallNotAllowed):
                await outside.api.ask_again(2)
            with pytest.raises(CallNotAllowed):
                await client.ref("system", subject.address, SystemApi).api.stop()
        assert set(await run.process_statistics()) == {"run", "early", "late"}
        async with ActorSystem("node", keys=Keys.load(run.keys_file)) as node:
            await node.connect(run.address)
            assert await (await node.lookup("late", Subject)).api.ask(7) == 7
