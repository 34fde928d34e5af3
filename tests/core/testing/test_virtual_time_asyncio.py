"""A loop in virtual time: asyncio on top of it, and what is refused."""

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from flexmarl.core.errors import NotInVirtualTime
from flexmarl.core.testing.virtual_time import REFUSED, VirtualTimeLoop, run

from .clock import now_s

# --------------------------------------------------------------------------- asyncio on top of it


def test_timeouts_expire_at_their_time() -> None:
    async def main() -> list[float]:
        expired_s = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.Event().wait()
        expired_s.append(now_s())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 60)
        expired_s.append(now_s())
        assert await asyncio.wait_for(asyncio.sleep(10, "slept"), 11) == "slept"
        expired_s.append(now_s())
        return expired_s

    assert run(main()) == [3600.0, 3660.0, 3670.0]


def test_a_task_group_cancels_in_the_order_in_which_its_tasks_were_made() -> None:
    cancelled: list[int] = []

    async def waits(i: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(i)

    async def fails() -> None:
        await asyncio.sleep(1)
        raise ValueError("one")

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                for i in range(500):
                    group.create_task(waits(i))
                group.create_task(fails())
        assert [str(error) for error in caught.value.exceptions] == ["one"]

    run(main())
    assert cancelled == list(range(500))


def test_a_cancelled_task_cleans_up_in_virtual_time() -> None:
    async def worker() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(30)

    async def main() -> float:
        task = asyncio.create_task(worker())
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return now_s()

    assert run(main()) == 31.0


def test_context_variables_follow_tasks_and_callbacks_and_never_leak() -> None:
    variable = contextvars.ContextVar("variable", default="external")

    async def child() -> str:
        await asyncio.sleep(1)
        return variable.get()

    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        variable.set("first")
        task = asyncio.create_task(child())
        called = loop.create_future()
        loop.call_later(1, lambda: called.set_result(variable.get()))
        other = contextvars.copy_context()
        other.run(variable.set, "given")
        given_task = asyncio.create_task(child(), context=other)
        given_call = loop.create_future()
        loop.call_at(1, lambda: given_call.set_result(variable.get()), context=other)
        variable.set("second")
        return [await task, await called, await given_task, await given_call]

    assert run(main()) == ["first", "first", "given", "given"]
    assert variable.get() == "external"


def test_an_exception_in_a_callback_goes_to_the_handler_and_the_loop_goes_on() -> None:
    errors: list[object] = []

    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(type(context["exception"])))
        loop.call_later(1, lambda: 1 // 0)
        await asyncio.sleep(2)
        return now_s()

    assert run(main()) == 2.0
    assert errors == [ZeroDivisionError]


def test_debug_mode_works() -> None:
    async def main() -> float:
        await asyncio.sleep(60)
        return now_s()

    with asyncio.Runner(debug=True, loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(main()) == 60.0


def test_a_loop_that_was_stopped_runs_what_is_ready_and_stops() -> None:
    loop = VirtualTimeLoop()
    ran: list[float] = []
    try:
        loop.call_soon(loop.stop)
        loop.call_soon(lambda: ran.append(loop.time()))
        loop.call_later(1, print)
        loop.run_forever()
        loop.stop()
        loop.run_forever()
        assert ran == [0.0]
        assert loop.time() == 0.0
    finally:
        loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1, print)


def test_a_task_may_be_named() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[None]] = [
            loop.create_task(asyncio.sleep(1), name="one"),
            asyncio.create_task(asyncio.sleep(1), name="two"),
        ]
        await asyncio.wait(tasks)
        return [task.get_name() for task in tasks]

    assert run(main()) == ["one", "two"]


def test_a_task_factory_is_used() -> None:
    made: list[str] = []

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(coro.__qualname__)
        return asyncio.Task(coro, loop=loop, **options)

    async def main() -> str:
        asyncio.get_running_loop().set_task_factory(factory)
        task = asyncio.create_task(asyncio.sleep(1), name="named")
        await task
        assert made == ["sleep"]
        return task.get_name()

    assert run(main()) == "named"


# --------------------------------------------------------------------------- the real world


def test_every_method_of_a_loop_either_works_or_is_refused() -> None:
    """A method that a later Python adds fails here until someone decides."""
    works = {
        *("run_forever", "run_until_complete", "stop", "is_running", "is_closed", "close", "time"),
        *("call_soon", "call_soon_threadsafe", "call_later", "call_at", "create_future", "create_task"),
        *("set_task_factory", "get_task_factory", "get_debug", "set_debug"),
        *("get_exception_handler", "set_exception_handler"),
        *("default_exception_handler", "call_exception_handler"),
        *("shutdown_asyncgens", "shutdown_default_executor"),
    }
    methods = {name for name in dir(asyncio.AbstractEventLoop) if not name.startswith("_")}
    assert methods == works | set(REFUSED)
    assert not works & set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_the_real_world_is_refused(name: str) -> None:
    async def main() -> None:
        await getattr(asyncio.get_running_loop(), name)(0, print)

    with pytest.raises(NotInVirtualTime, match=f"^{name} waits for the real world") as caught:
        run(main())
    assert caught.value.operation == name


@pytest.mark.parametrize(
    "ask",
    [
        lambda: asyncio.to_thread(print),
        lambda: asyncio.create_subprocess_exec("true"),
        lambda: asyncio.open_connection("localhost", 1),
        lambda: asyncio.start_server(lambda *_: None, "localhost"),
    ],
)
def test_what_asyncio_builds_on_it_is_refused(ask: Callable[[], Any]) -> None:
    async def main() -> None:
        await ask()

    with pytest.raises(NotInVirtualTime):
        run(main())


def test_calls_from_another_thread_are_refused_and_from_its_own_allowed() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        events: list[str] = []

        def foreign() -> None:
            try:
                loop.call_soon_threadsafe(events.append, "never")
            except NotInVirtualTime as error:
                events.append(error.operation)

        thread = threading.Thread(target=foreign)
        thread.start()
        thread.join()
        context = contextvars.copy_context()
        context.run(variable.set, "own")
        loop.call_soon_threadsafe(lambda: events.append(variable.get()), context=context)
        await asyncio.sleep(0)
        return events

    variable = contextvars.ContextVar[str]("variable")

    assert run(main()) == ["a call from another thread (call_soon_threadsafe)", "own"]


def test_a_dropped_async_generator_is_closed() -> None:
    closed_s: list[float] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(5)
            closed_s.append(now_s())

    async def main() -> None:
        async for _ in numbers():
            break
        await asyncio.sleep(60)
        assert closed_s == [5.0]

    run(main())
