"""Deadlines of calls that the callee notices before their caller."""

import asyncio
import time

import pytest

from flexmarl.core.errors import CallTimeout
from flexmarl.core.supervision.supervisor import Supervisor

from ..echo import Echo


async def test_a_caller_whose_loop_was_blocked_gets_the_timeout_as_any_other(supervisor: Supervisor) -> None:
    await supervisor.spawn("echo:Echo", "echo", {})
    echo = supervisor.reference("echo", Echo)
    call = asyncio.ensure_future(echo.within(0.3).hang())
    assert await echo.api.greet("world") == "hello world"  # behind the other one: that has begun
    time.sleep(1.5)  # noqa: ASYNC251  # the callee's answer arrives while this loop can't look at its timers
    with pytest.raises(CallTimeout, match=r"echo.hang: no answer within 0.3 s"):
        await call
