"""The page that a run serves itself (``page.listen``). It is never the reason for a run's end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from ...core.base.texts import text_of
from ...core.errors import FlexmarlError
from ...core.telemetry import get_logger
from ..monitoring.console.display import Display
from ..run_folder.run_directory import RunDirectory

log = get_logger(__name__)

_OPEN_S: Final = 30.0
_CLOSE_S: Final = 10.0


@asynccontextmanager
async def opened_page(listen: str | None, directory: RunDirectory, display: Display) -> AsyncIterator[str]:
    """Serves the page of the run in ``directory`` while it is entered; its address with the key, empty without one. A
    page that can't be served, or that fails later, is a warning on ``display``."""
    if listen is None:
        yield ""
        return
    opening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    closing = asyncio.Event()
    # A task of its own, in no group: a defect of the page cancels nothing of the run.
    page = asyncio.create_task(_serve(listen, directory, display, opening, closing), name="page of the run")
    try:
        await asyncio.wait([opening], timeout=_OPEN_S)
        if not opening.done():
            display.warn(
                f"the page of the run is not open after {_OPEN_S:.0f} s; the run does not wait for it",
                at_once=True,
            )
        yield opening.result() if opening.done() else ""
    finally:
        closing.set()
        await asyncio.wait([page], timeout=_CLOSE_S)
        if not page.done():
            display.warn(
                f"the page of the run has not closed after {_CLOSE_S:.0f} s: the run has ended, and waits for a "
                "request that reads its files",
                at_once=True,
            )
            page.cancel()
        await asyncio.wait([page])


async def _serve(
    listen: str,
    directory: RunDirectory,
    display: Display,
    opening: "asyncio.Future[str]",
    closing: asyncio.Event,
) -> None:
    try:
        # Imported here: a run without a page does not pay for it.
        from ..monitoring.page.server import served_page

        async with served_page([directory.path], listen, "page.listen=") as address:
            display.note(f"page: {address}")
            if not opening.done():
                opening.set_result(address)
            await closing.wait()
    except Exception as error:  # shown, and the run continues without the page
        if not isinstance(error, FlexmarlError):
            log.exception("the page of the run has failed")
        display.warn(f"the run has no page, and continues without it: {text_of(error)}", at_once=True)
    finally:
        if not opening.done():
            opening.set_result("")
