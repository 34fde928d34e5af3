"""The answers of a running run's process, as the page and the terminal show them."""

import asyncio
from contextlib import suppress
from dataclasses import asdict
from typing import Final

from ....core.errors import FlexmarlError
from ...run.connected_run import connect
from .recorded_run import RecordedRun

_ASK_S: Final = 2.0
_ABSENT_S: Final = 5.0


async def follow_status(run: RecordedRun, *, with_waits: bool = False) -> None:
    """Keeps ``run.live`` up to date, as long as the run has a process that may be asked. ``with_waits``: of the actors
    too, which are asked themselves."""
    while True:
        # Whatever it answers: the folder is shown, and other runs are too.
        with suppress(FlexmarlError, OSError):
            if run.directory.control_address.exists():
                async with connect(run.path) as connected:
                    while True:
                        waits = await connected.actor_waits() if with_waits else ()
                        answer = {**asdict(await connected.status()), "waits": waits}
                        # In a thread: it waits for one that reads a long run's files.
                        await asyncio.to_thread(run.set_live, answer)
                        await asyncio.sleep(_ASK_S)
        await asyncio.to_thread(run.set_live, None)
        await asyncio.sleep(_ABSENT_S)
