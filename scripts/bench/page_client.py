"""A client that has a run's page open, as a browser does: it follows the changes, and reads the panel Now at each."""

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Final

import httpx2

import flexmarl
from flexmarl.core.errors import FlexmarlError

_OPEN_S: Final = 60.0
_LOOK_S: Final = 0.5
_END_S: Final = 30.0


@contextmanager
def opened_page(run: Path) -> Iterator[None]:
    """Reads the page that the run in ``run`` serves, in a process of its own, until the run ends. Raises RuntimeError
    at the end if the page has shown no change."""
    context = multiprocessing.get_context("spawn")
    panels = context.Value("i", 0)
    client = context.Process(target=_read, args=(run, panels), name="client of the page")
    client.start()
    try:
        yield
        client.join(_END_S)
        if client.exitcode != 0 or not panels.value:
            raise RuntimeError(
                f"the client of the page has read {panels.value} panels, and ended with {client.exitcode}"
            )
    finally:
        client.kill()
        client.join()


def _read(run: Path, panels: "Synchronized[int]") -> None:
    asyncio.run(_follow(run, panels))


async def _follow(run: Path, panels: "Synchronized[int]") -> None:
    async with asyncio.timeout(_OPEN_S):
        address = await _page_of(run)
    with suppress(httpx2.TransportError):  # the run has ended
        async with (
            httpx2.AsyncClient(base_url=address, timeout=None) as client,
            client.stream("GET", "changes") as changes,
        ):
            async for line in changes.aiter_lines():
                if line.startswith("data:"):
                    (await client.get("panels/now.json", params={"run": 0})).raise_for_status()
                    panels.value += 1


async def _page_of(run: Path) -> str:
    while True:
        try:
            async with flexmarl.connect(run) as connected:
                if page := (await connected.status()).page:
                    return page
        except FlexmarlError:  # it has not begun
            pass
        await asyncio.sleep(_LOOK_S)
