"""A system in a process of a service: it leaves nothing behind, and changes nothing global."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.errors import SystemClosed
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire.curve import Keys
from flexmarl.core.wire.zeromq import Tcp

from ..patience import PATIENCE_S
from .echo import Echo

ROUNDS = 100
LOOPS: list[Any] = [asyncio.new_event_loop, uvloop.new_event_loop]


class Ticker(Actor):
    """Something of everything: background work, a stream, a call that never ends."""

    async def on_start(self) -> None:
        self.background(self._wait(), "wait")

    async def _wait(self) -> None:
        await asyncio.Event().wait()

    @endpoint
    async def numbers(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number

    @endpoint
    async def hang(self) -> None:
        await asyncio.Event().wait()


async def use(system: ActorSystem, echo: ActorRef[Echo]) -> None:
    """A call, a one-way message, a stream, and a call that is still under way when the system is closed."""
    assert await echo.api.greet("world") == "hello world"
    await echo.tell("hear", 1)
    ticker = await system.add(Ticker(), "ticker")
    assert [number async for number in ticker.api.numbers(3)] == [0, 1, 2]
    hanging = asyncio.ensure_future(ticker.api.hang())
    hanging.add_done_callback(lambda ended: ended.exception())
    await asyncio.sleep(0)


@asynccontextmanager
async def two_systems(tcp: bool) -> AsyncIterator[ActorSystem]:
    """One that listens and one that calls it, so that there are sockets on both sides."""
    keys = Keys.make() if tcp else None
    async with (
        ActorSystem("callee", tcp=Tcp(keys=keys) if tcp else None) as callee,
        ActorSystem("caller", keys=keys) as caller,
    ):
        remote = await callee.add(Echo(), "echo")
        await use(caller, caller.ref("echo", remote.address, Echo))
        yield caller


class Held:
    """The resources of the process, as the kernel sees them."""

    def __init__(self) -> None:
        gc.collect()
        process = psutil.Process()
        self.descriptors = Counter(_descriptors())
        self.threads = Counter(range(process.num_threads()))  # those of libzmq are unknown to Python
        self.python_threads = Counter(thread.name for thread in threading.enumerate())
        self.children = Counter(process.children())


def assert_all_given_back(before: Held) -> None:
    """A thread that has ended is listed by the kernel for a moment longer."""
    give_up_at = time.monotonic() + PATIENCE_S
    while _more_than(before) and time.monotonic() < give_up_at:
        time.sleep(0.01)
    assert _more_than(before) == {}


def _more_than(before: Held) -> dict[str, Any]:
    """The resources that were not there before. Fewer are fine: what earlier tests have left ends at any time."""
    now, then = vars(Held()), vars(before)
    return {name: more for name, value in now.items() if (more := value - then[name])}


def _descriptors() -> list[str]:
    """The target of each open descriptor, by its number."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that this very list was read by
            found.append(f"{descriptor.name} {descriptor.readlink()}")
    return sorted(found)


def process_wide() -> dict[str, Any]:
    """The state of the whole process, which belongs to the service."""
    return {
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "wakeup fd": _wakeup_fd(),
        "logging": (logging.root.level, list(logging.root.handlers), logging.getLoggerClass()),
        "structlog": structlog.get_config() | {"processors": list(structlog.get_config()["processors"])},
        "policy": _policy(),
        "environment": {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
        "directory": os.getcwd(),  # noqa: PTH109
        "umask": _umask(),
        "exception hooks": (threading.excepthook, sys.excepthook),
    }


def _policy() -> Any:
    # Python 3.16 has no policies any more.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return asyncio.get_event_loop_policy()


def _wakeup_fd() -> int:
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    return fd


def _umask() -> int:
    umask = os.umask(0o77)
    os.umask(umask)
    return umask


@pytest.fixture(autouse=True)
def nothing_changes() -> Iterator[None]:
    before = process_wide()
    yield
    assert process_wide() == before


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


@pytest.mark.parametrize("tcp", [False, True], ids=["ipc", "tcp_curve"])
def test_a_hundred_starts_leave_nothing(runner: asyncio.Runner, tcp: bool) -> None:
    async def start_and_stop() -> None:
        async with two_systems(tcp):
            pass
        assert asyncio.all_tasks() == {asyncio.current_task()}

    async def rounds() -> None:
        await start_and_stop()  # what is loaded and opened once only
        before = Held()
        for _ in range(ROUNDS):
            await start_and_stop()
        assert_all_given_back(before)

    runner.run(rounds())


def test_a_plain_asyncio_run() -> None:
    async def main() -> str:
        async with ActorSystem("service") as system:
            echo = await system.add(Echo(), "echo")
            return await echo.api.greet("world")

    before = Held()
    assert asyncio.run(main()) == "hello world"
    assert_all_given_back(before)


def test_a_failing_service_leaves_nothing(runner: asyncio.Runner) -> None:
    async def fail() -> None:
        async with two_systems(tcp=False):
            raise KeyError("the service's own")

    async def main() -> None:
        with pytest.raises(KeyError):
            await fail()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    runner.run(main())
    before = Held()
    runner.run(main())
    assert_all_given_back(before)


def test_a_cancelled_service_leaves_nothing(runner: asyncio.Runner) -> None:
    async def serve(started: asyncio.Event) -> None:
        async with two_systems(tcp=False):
            started.set()
            await asyncio.Event().wait()

    async def main() -> None:
        started = asyncio.Event()
        service = asyncio.ensure_future(serve(started))
        await started.wait()
        service.cancel()
        with pytest.raises(asyncio.CancelledError):
            await service
        assert asyncio.all_tasks() == {asyncio.current_task()}

    runner.run(main())
    before = Held()
    runner.run(main())
    assert_all_given_back(before)


def service() -> Starlette:
    """A web service as people write it, with an actor in it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with ActorSystem("service") as system:
            app.state.echo = await system.add(Echo(), "echo")
            yield

    async def greet(request: Request) -> PlainTextResponse:
        return PlainTextResponse(await request.app.state.echo.api.greet(request.path_params["name"]))

    return Starlette(routes=[Route("/{name}", greet)], lifespan=lifespan)


async def get(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return answer


async def serve_once(requests: int) -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(service(), log_config=None, lifespan="on", timeout_graceful_shutdown=2)
        server = uvicorn.Server(config)
        serving = asyncio.ensure_future(server.serve([listening]))
        while not server.started:
            assert not serving.done(), serving.exception()
            await asyncio.sleep(0.01)
        assert signal.getsignal(signal.SIGTERM) == server.handle_exit
        port = listening.getsockname()[1]
        answers = await asyncio.gather(*(get(port, f"/visitor-{number}") for number in range(requests)))
        server.should_exit = True
        await serving
        return answers


def test_in_a_web_service(runner: asyncio.Runner) -> None:
    runner.run(serve_once(1))
    before = Held()
    for _ in range(3):
        answers = runner.run(serve_once(20))
        for number, answer in enumerate(answers):
            head, _, body = answer.partition("\r\n\r\n")
            assert head.startswith("HTTP/1.1 200") and body == f"hello visitor-{number}"
    assert_all_given_back(before)


def test_processes_of_its_actors_leave_nothing(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)  # a spawned process finds what this one does

    async def main() -> None:
        async with ActorSystem("service") as system:
            ref: ActorRef[Any] = await system.spawn("echo:Echo", "echo", {"greeting": "bye"}, process=True)
            assert await ref.ask("greet", "world") == "bye world"
        assert asyncio.all_tasks() == {asyncio.current_task()}

    runner.run(main())
    for thread in threading.enumerate():
        if thread.name == "end of fork server":
            thread.join(PATIENCE_S)
    before = Held()
    runner.run(main())
    runner.run(main())
    assert_all_given_back(before)


def test_several_systems_in_one_loop(runner: asyncio.Runner) -> None:
    async def main() -> None:
        async with ActorSystem("a") as a, ActorSystem("b") as b, ActorSystem("c") as c:
            homes = [await system.add(Echo(f"{system.name} says"), "echo") for system in (a, b, c)]
            for caller in (a, b, c):
                refs = [caller.ref("echo", home.address, Echo) for home in homes]
                answers = await asyncio.gather(*(ref.api.greet(caller.name) for ref in refs))
                assert answers == [f"{callee} says {caller.name}" for callee in "abc"]
            # The others do not notice when one leaves.
            async with ActorSystem("d") as d:
                assert await d.ref("echo", homes[0].address, Echo).api.greet("d") == "a says d"
            assert await a.ref("echo", homes[2].address, Echo).api.greet("a") == "c says a"
        with pytest.raises(SystemClosed):
            await homes[0].api.greet("nobody")

    runner.run(main())


@pytest.mark.parametrize(
    "loops",
    [LOOPS, LOOPS[::-1], LOOPS[:1] * 2, LOOPS[1:] * 2],
    ids=["asyncio-uvloop", "uvloop-asyncio", "asyncio-asyncio", "uvloop-uvloop"],
)
def test_systems_in_two_loops_in_two_threads(loops: list[Callable[[], Any]]) -> None:
    """They reach each other as any two systems do."""
    addresses: list[str] = ["", ""]
    answers: list[list[str]] = [[], []]
    both = threading.Barrier(2, timeout=PATIENCE_S)

    async def main(own: int) -> None:
        async with ActorSystem(f"system-{own}") as system:
            addresses[own] = (await system.add(Echo(f"{own} says"), "echo")).address
            await asyncio.to_thread(both.wait)
            other = system.ref("echo", addresses[1 - own], Echo)
            answers[own] = await asyncio.gather(*(other.api.greet(str(number)) for number in range(200)))
            await asyncio.to_thread(both.wait)

    def run(own: int) -> None:
        with asyncio.Runner(loop_factory=loops[own]) as runner:
            runner.run(main(own))

    before = Held()
    threads = [threading.Thread(target=run, args=[own]) for own in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    assert answers == [[f"{1 - own} says {number}" for number in range(200)] for own in (0, 1)]
    assert_all_given_back(before)
