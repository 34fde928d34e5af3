"""The failure of a task group, raised as one error."""

import asyncio

import pytest

from flexmarl.core.base.task_groups import first_error


async def fail(error: Exception) -> None:
    raise error


async def test_the_first_error_comes_out_of_nested_groups() -> None:
    async def inner() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail(KeyError("first")))
            group.create_task(asyncio.sleep(3600))

    with pytest.raises(KeyError, match="first"), first_error():
        async with asyncio.TaskGroup() as group:
            group.create_task(inner())
            group.create_task(asyncio.sleep(3600))


async def test_other_errors_and_results_pass() -> None:
    with pytest.raises(ValueError, match="alone"), first_error():
        await fail(ValueError("alone"))
    with first_error():
        assert await asyncio.sleep(0, "result") == "result"
