"""ZeroMQ under actor systems: admission over TCP, addresses without a listener, buffers that are not copied."""

import asyncio
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
import structlog
import zmq

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.errors import LocalProtocolError, PlainTcpRefused, Unreachable
from flexmarl.core.protocol.codec import Buffer, Bytes
from flexmarl.core.protocol.session import Settings
from flexmarl.core.supervision.system_api import SystemApi
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire import zeromq
from flexmarl.core.wire.curve import Keys
from flexmarl.core.wire.loop_socket import ConnectionMonitor, Frames
from flexmarl.core.wire.wire import Link
from flexmarl.core.wire.zeromq import Tcp, ZmqWire, listening_socket

from ...contracts.clusters import until
from ...patience import PATIENCE_S
from ..echo import Echo


class Recorder:
    """A listener that keeps the order of its events."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.links: list[Link] = []

    def received(self, link: Link, message: Bytes, buffers: Sequence[Bytes]) -> None:
        self.events.append("message")
        self.links.append(link)

    def connected(self, link: Link) -> None:
        self.events.append("connected")

    def disconnected(self, link: Link, reason: str) -> None:
        self.events.append("disconnected")

    def refused(self, link: Link, reason: str) -> None:
        self.events.append("refused")

    def crashed(self) -> None: ...


IMPATIENT = Settings(connect_timeout_s=0.5)


async def refused(outside: ActorSystem, address: str, reason: str) -> None:
    """Returns once a connection is refused for ``reason``: on a busy machine the reason may come after the deadline."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with pytest.raises(Unreachable) as caught:
                await outside.connect(address)
            if re.search(reason, str(caught.value)):
                return


class TestWhoGetsIn:
    async def test_whoever_holds_the_keys_of_the_run(self) -> None:
        async with ActorSystem("run", tcp=Tcp()) as run:
            await run.add(Echo(), "echo")
            assert stat.S_IMODE(run.keys_file.stat().st_mode) == 0o600
            async with ActorSystem("external", keys=Keys.load(run.keys_file)) as outside:
                await outside.connect(run.address)
                echo = await outside.lookup("echo", Echo)
                assert await echo.api.greet("world") == "hello world"

    async def test_a_client_of_its_own_once_it_is_allowed(self) -> None:
        async with ActorSystem("run", tcp=Tcp()) as run:
            assert run.keys is not None
            keys = Keys.for_client(run.keys.server_public)
            async with ActorSystem("external", keys=keys, settings=IMPATIENT) as outside:
                await refused(outside, run.address, "does not admit this side's key")
                await run.allow(keys.client_public)
            async with ActorSystem("external", keys=keys) as outside:
                await outside.connect(run.address)

    async def test_nobody_who_takes_it_for_another_server(self) -> None:
        async with (
            ActorSystem("run", tcp=Tcp()) as run,
            ActorSystem("external", keys=Keys.make(), settings=IMPATIENT) as outside,
        ):
            await refused(outside, run.address, "within 0.5 s .*the handshake fails; has it got other keys")

    async def test_nobody_without_keys(self) -> None:
        async with (
            ActorSystem("run", tcp=Tcp()) as run,
            ActorSystem("external", settings=IMPATIENT) as outside,
        ):
            await refused(outside, run.address, "secured in another way")

    async def test_plain_tcp_on_loopback_where_both_say_so(self) -> None:
        async with (
            ActorSystem("one", tcp=Tcp(plain=True)) as one,
            ActorSystem("two", tcp=Tcp(plain=True)) as two,
        ):
            await two.connect(one.address)
            assert not one.keys_file.exists()

    async def test_plain_tcp_does_not_leave_the_machine_unless_told(self) -> None:
        with pytest.raises(PlainTcpRefused, match="plain_beyond_loopback"):
            async with ActorSystem("one", tcp=Tcp(host="0.0.0.0", plain=True, advertise="node")):
                pass
        async with ActorSystem("external") as outside:
            with pytest.raises(PlainTcpRefused, match="plain_beyond_loopback"):
                await outside.connect("tcp://192.0.2.1:5555")

    async def test_a_port_that_is_taken(self) -> None:
        async with ActorSystem("one", tcp=Tcp(plain=True)) as one:
            port = int(one.address.rpartition(":")[2])
            with pytest.raises(OSError, match="can't listen on tcp://127.0.0.1"):
                async with ActorSystem("two", tcp=Tcp(port=port, plain=True)):
                    pass


class TestAConnectionThatIsMadeAgain:
    async def test_is_reported_before_its_messages_even_if_they_are_read_first(
        self, private: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The monitor of a connection is a socket of its own: the loop may come to it later."""
        far, near = Recorder(), Recorder()
        server, client = ZmqWire(f"ipc://{private}/server.sock"), ZmqWire(f"ipc://{private}/client.sock")
        server.start(b"server", far)
        client.start(b"client", near)
        report, kept = ConnectionMonitor._deliver, list[tuple[ConnectionMonitor, Frames]]()
        try:
            link = client.connect(server.address)
            link.send(b"a")
            await until(lambda: far.links)
            with monkeypatch.context() as patch:
                patch.setattr(ConnectionMonitor, "_deliver", lambda *event: kept.append(event))
                assert link.drop()

                def answered() -> bool:
                    far.links[0].send(b"b")
                    return "message" in near.events

                await until(answered)
                assert near.events[1:3] == ["connected", "message"]
            await until(lambda: kept)
            for event in kept:
                report(*event)
            assert near.events.count("connected") == 2, "not again when the event comes"
            link.send(b"c")
            await until(lambda: far.events == ["message", "message"])
        finally:
            client.close()
            server.close()


class TestNobodyThere:
    @pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "ipc:///nowhere/at/all.sock"])
    async def test_a_dead_address_is_an_error_within_the_connect_deadline(
        self, private: Path, address: str
    ) -> None:
        async with asyncio.timeout(PATIENCE_S), ActorSystem("lonely", private, settings=IMPATIENT) as lonely:
            calls = [lonely.ref("nobody", address).ask("greet", "x") for _ in range(3)]
            results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, Unreachable) and address in str(result) for result in results)

    async def test_no_address_at_all(self, system: ActorSystem) -> None:
        with pytest.raises(LocalProtocolError, match="'rubbish' is not the address"):
            await system.ref("nobody", "rubbish", SystemApi).api.process_statistics()


class Holder(Actor):
    """Keeps what it was sent, to look at where its bytes are."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    @endpoint
    async def keep(self, buffers: list[Buffer]) -> list[Buffer]:
        self.buffers += buffers
        return buffers


class Counter(Actor):
    @endpoint
    async def add_one(self, number: int) -> int:
        return number + 1


async def test_calls_by_two_addresses_of_one_system_are_answered_each(private: Path) -> None:
    async with ActorSystem("there", private) as there, ActorSystem("here") as here:
        await there.add(Counter(), "counter")
        detour = there.address.replace(private.name, f"{private.name}/../{private.name}")
        answers = [
            await here.ref("counter", address, Counter).api.add_one(number)
            for number, address in enumerate((there.address, detour, there.address, detour))
        ]
    assert answers == [1, 2, 3, 4]


class TestBuffers:
    @pytest.mark.parametrize("tcp", [None, Tcp()], ids=["ipc", "tcp_curve"])
    async def test_small_and_large_ones_arrive_in_order_and_come_back(self, tcp: Tcp | None) -> None:
        contents = [bytes([n]) * size for n, size in enumerate((0, 1, 4096, 4097, 300_000, 5_000_000))]
        async with ActorSystem("there", tcp=tcp) as there:
            holder = Holder()
            await there.add(holder, "holder")
            async with ActorSystem("here", keys=there.keys) as here:
                ref = here.ref("holder", there.address, Holder)
                back = await ref.api.keep([Buffer(content) for content in contents])
        assert [bytes(buffer.view) for buffer in holder.buffers] == contents
        assert [bytes(buffer.view) for buffer in back] == contents


async def test_a_wire_that_can_not_listen_leaves_nothing_open(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path / 'no' / 'such' / 'folder.sock'}"
    with pytest.raises(OSError, match="can't listen on ipc://"):
        async with ActorSystem("one", tmp_path, wire=ZmqWire(address)):
            pass
    assert list(tmp_path.iterdir()) == []


async def test_a_wire_closes_although_libzmq_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeromq, "_TERM_S", 0.05)
    held = []
    path = tmp_path / "a.sock"
    with structlog.testing.capture_logs() as lines:
        async with ActorSystem("a", wire=ZmqWire(f"ipc://{path}")) as system:
            assert isinstance(system._wire, ZmqWire) and system._wire._context is not None
            held.append(system._wire._context.socket(zmq.PAIR))  # libzmq waits until it is closed
    held.pop().close(linger=0)
    assert not path.exists() and ["ZeroMQ does not end" in line["event"] for line in lines] == [True]


async def test_a_listening_socket_is_closed_by_its_wire_and_by_nothing_else() -> None:
    """A second close of its number would end a socket that libzmq has made meanwhile, and with that this process."""
    tcp = Tcp(plain=True)
    listening = listening_socket(tcp)
    number, port = listening.fileno(), listening.getsockname()[1]
    async with ActorSystem("one", tcp=tcp, wire=ZmqWire(tcp, listening=listening)) as system:
        assert system.address == f"tcp://127.0.0.1:{port}" and listening.fileno() == -1
        listening.close()
        assert os.path.sameopenfile(number, number), "still open"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


async def test_a_listening_socket_of_a_wire_that_can_not_listen_is_closed() -> None:
    tcp = Tcp("192.0.2.1")
    listening = listening_socket(Tcp())
    with pytest.raises(PlainTcpRefused):
        async with ActorSystem("one", wire=ZmqWire(tcp, listening=listening)):
            pass
    assert listening.fileno() == -1
