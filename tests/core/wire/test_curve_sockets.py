"""Real CURVE sockets with and without the right keys."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psutil
import pytest
import structlog
import uvloop
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from flexmarl.core.errors import InvalidKeys
from flexmarl.core.wire.curve import Gate, Keys, protect_client, protect_server

from ...patience import PATIENCE_S
from .keys import KEYS

REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


T = TypeVar("T")
Run = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(main(), timeout=PATIENCE_S))

    return run


async def until(condition: Callable[[], bool]) -> None:
    """The gate needs the loop: a condition is looked at between two of its turns."""
    while not condition():
        await asyncio.sleep(0.001)


class Server:
    """A protected socket that is listened to, with what its monitor says of handshakes."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: Keys) -> None:
        self._context = context
        self.socket = context.socket(zmq.PULL)
        protect_server(self.socket, keys)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | REFUSED)
        self.socket.bind("tcp://127.0.0.1:*")
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.events: list[int] = []

    def client(self, keys: Keys | None, says: bytes) -> "zmq.Socket[bytes]":
        """Connects, and sends one message as soon as it is let in."""
        client = self._context.socket(zmq.PUSH)
        client.linger = 0
        client.set(zmq.RECONNECT_IVL, 10)
        if keys is not None:
            protect_client(client, keys)
        client.connect(self.address)
        client.send(says)
        return client

    async def receive(self) -> bytes:
        await until(lambda: bool(self.socket.poll(0)))
        return self.socket.recv(zmq.NOBLOCK)

    def handshakes(self) -> list[int]:
        frames = _drained(lambda: self._monitor.recv_multipart(zmq.NOBLOCK))
        self.events += [parse_monitor_message(message)["event"] for message in frames]
        return self.events

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=0)


def _drained(receive: Callable[[], T]) -> list[T]:
    taken = []
    while True:
        try:
            taken.append(receive())
        except zmq.Again:
            return taken


@contextmanager
def gated(keys: Keys = KEYS) -> Iterator[tuple[Server, Gate]]:
    context = zmq.Context()
    gate = Gate(context, keys.allowed)
    gate.start()
    server = Server(context, keys)
    try:
        yield server, gate
    finally:
        server.close()
        gate.close()
        context.destroy(linger=0)


@pytest.mark.parametrize(
    "stranger",
    [
        pytest.param(Keys.for_client(KEYS.server_public), id="a key that is not allowed"),
        pytest.param(None, id="no key (NULL mechanism)"),
        pytest.param(Keys.for_client(Keys.make().server_public), id="another server's key"),
        pytest.param(
            Keys(Keys.make().server_public, KEYS.client_public, KEYS.client_secret),
            id="an allowed key that expects another server",
        ),
    ],
)
def test_only_the_allowed_client_gets_through(run: Run, stranger: Keys | None) -> None:
    async def main() -> None:
        with gated() as (server, gate):
            refused = server.client(stranger, b"stranger")
            await until(lambda: any(event & REFUSED for event in server.handshakes()))
            friend = server.client(KEYS, b"friend")
            assert await server.receive() == b"friend"
            assert not server.socket.poll(0)
            assert server.handshakes().count(zmq.EVENT_HANDSHAKE_SUCCEEDED) == gate.admitted == 1
            refused.close()
            friend.close()

    run(main)


def test_refusals_are_counted_each_and_logged_once(run: Run) -> None:
    strangers = [Keys.for_client(KEYS.server_public) for _ in range(2)]

    async def main() -> None:
        with gated() as (server, gate), structlog.testing.capture_logs() as lines:
            for expected in (1, 2, 3, 4, 5, 6):
                with server.client(strangers[expected % 2], b"stranger"):
                    while gate.denied < expected:
                        await asyncio.sleep(0.001)
            assert gate.denied == 6
        assert sorted(line["key_prefix"] for line in lines) == sorted(k.client_public[:8] for k in strangers)
        assert {(line["log_level"], line["address"]) for line in lines} == {("warning", "127.0.0.1")}
        assert not any(keys.client_public in str(lines) for keys in strangers)

    run(main)


def test_a_refused_client_is_told_and_gets_in_once_it_is_allowed(run: Run) -> None:
    outside = Keys.for_client(KEYS.server_public)

    async def main() -> None:
        with gated() as (server, gate), server.client(outside, b"never sent") as client:
            monitor = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            await until(lambda: bool(monitor.poll(0)))
            assert parse_monitor_message(monitor.recv_multipart())["value"] == 400
            client.disable_monitor()
            monitor.close(linger=0)
            gate.allow(outside.client_public)
            with server.client(outside, b"at last"):
                assert await server.receive() == b"at last"
            assert (gate.admitted, gate.denied) == (1, 1)

    run(main)


@pytest.mark.parametrize("gate_is", ["never started", "closed"])
def test_without_a_gate_nobody_gets_in(run: Run, gate_is: str) -> None:
    async def main() -> None:
        with gated() as (server, gate):
            gate.close()
            if gate_is == "never started":
                gate = Gate(server._context, KEYS.allowed)
            client = server.client(KEYS, b"friend")
            await until(lambda: server.handshakes() != [])
            assert server.events == [zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL]
            assert not server.socket.poll(0)
            client.close()
            gate.close()

    run(main)


def test_a_connection_outlives_the_gate_and_bears_its_key(run: Run) -> None:
    async def main() -> None:
        with gated() as (server, gate):
            client = server.client(KEYS, b"before")
            await until(lambda: bool(server.socket.poll(0)))
            gate.close()
            assert server.socket.recv(copy=False).get("User-Id") == KEYS.client_public
            client.send(b"after")
            assert server.socket.recv() == b"after"
            client.close()

    run(main)


def test_many_clients_at_once(run: Run) -> None:
    async def main() -> None:
        with gated() as (server, gate):
            clients = [server.client(KEYS, b"%d" % number) for number in range(100)]
            assert len({await server.receive() for _ in clients}) == len(clients)
            assert gate.admitted == len(clients)
            for client in clients:
                client.close()

    run(main)


def test_starting_and_closing_leaves_nothing(run: Run) -> None:
    process = psutil.Process()

    async def main() -> None:
        async def once() -> None:
            with gated() as (server, gate):
                client = server.client(KEYS, b"x")
                assert await server.receive() == b"x"
                # A question may still be open.
                late = server.client(Keys.for_client(KEYS.server_public), b"y")
                gate.close()
                gate.close()
                gate.start()
                client.close()
                late.close()

        await once()

        def held() -> tuple[int, int, int]:
            return process.num_fds(), process.num_threads(), len(asyncio.all_tasks())

        before = held()
        for _ in range(50):
            await once()
        async with asyncio.timeout(PATIENCE_S):  # the kernel lists a thread that has ended for a moment
            while any(now > then for now, then in zip(held(), before, strict=True)):
                await asyncio.sleep(0.01)

    run(main)


def test_a_context_has_one_gate(run: Run) -> None:
    async def main() -> None:
        with gated() as (server, _):
            second = Gate(server._context, ())
            with pytest.raises(zmq.ZMQError) as refused:
                second.start()
            assert refused.value.errno == zmq.EADDRINUSE
            second.close()

    run(main)


QUESTION = [b"1.0", b"7", b"flexmarl", b"127.0.0.1", b"", b"CURVE", z85.decode(KEYS.client_public)]


@pytest.mark.parametrize(
    "question",
    [
        [b"2.0", *QUESTION[1:]],
        [*QUESTION[:2], b"", *QUESTION[3:]],
        [*QUESTION[:5], b"NULL"],
        [*QUESTION[:5], b"PLAIN", b"user", b"password"],
        [*QUESTION[:6]],
        [*QUESTION[:6], QUESTION[6][:-1]],
        [*QUESTION, b""],
        [b"1.0"],
        [b""],
    ],
)
def test_the_gate_refuses_every_other_question(run: Run, question: list[bytes]) -> None:
    async def main() -> None:
        with gated() as (server, gate):
            asker = server._context.socket(zmq.REQ)
            asker.connect("inproc://zeromq.zap.01")
            answers = []
            for each in (question, QUESTION):
                asker.send_multipart(each)
                await until(lambda: bool(asker.poll(0)))
                answers.append(asker.recv_multipart())
            asker.close(linger=0)
            assert answers[0] == [b"1.0", b"".join(question[1:2]), b"400", b"not allowed", b"", b""]
            assert answers[1] == [b"1.0", b"7", b"200", b"OK", KEYS.client_public.encode(), b""]
            assert (gate.admitted, gate.denied) == (1, 1)

    run(main)


def test_a_burst_of_questions_is_answered_to_the_end(run: Run) -> None:
    async def main() -> None:
        with gated() as (server, gate), server._context.socket(zmq.DEALER) as asker:
            asker.connect("inproc://zeromq.zap.01")
            for _ in range(1000):  # all there before the loop looks
                asker.send_multipart([b"", *QUESTION])
            await until(lambda: gate.admitted == 1000)

    run(main)


def test_an_endless_row_of_new_keys_fills_neither_memory_nor_log() -> None:
    context = zmq.Context()
    gate = Gate(context, ())
    with structlog.testing.capture_logs() as lines:
        for number in range(1000):
            gate._answer([*QUESTION[:6], number.to_bytes(32, "little")])
    context.term()
    assert gate.denied == 1000
    assert len(lines) == 257
    assert len(gate._refusals._periods) == 257


def test_a_client_s_keys_make_no_server() -> None:
    outside = Keys.for_client(KEYS.server_public)
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        with pytest.raises(InvalidKeys, match="server_secret"):
            protect_server(socket, outside)
        protect_server(socket, KEYS)
