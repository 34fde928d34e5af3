"""The page that a run serves itself, on runs whose engines and trainer are simulated."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

import flexmarl
from flexmarl.actors.errors import ConfigError
from flexmarl.launch.cli.status import words_of
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.monitoring.console.no_display import NoDisplay
from flexmarl.launch.monitoring.page import server
from flexmarl.launch.run.run_page import opened_page
from flexmarl.launch.run_folder.run_directory import RunDirectory

from ...patience import PATIENCE_S
from ..conftest import SIMULATED, TINY
from ..in_process import run_in_loop, wait_for_step
from ..monitoring.page.folders import folder_of
from ..run_folder.records import record


class NotedDisplay(NoDisplay):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str, *, at_once: bool = False) -> None:
        self.warnings.append(text)


async def test_a_run_serves_its_page_from_its_start_to_its_end(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.write_text("2")
    settings = (*SIMULATED, f"data.hold={hold}", "page.listen=0")
    async with (
        run_in_loop(tmp_path, "paged", *settings) as run,
        httpx2.AsyncClient(timeout=PATIENCE_S) as client,
        asyncio.timeout(PATIENCE_S),
    ):
        await wait_for_step(run, 1)
        async with flexmarl.connect(run.directory.path) as connected:
            status = await connected.status()
        assert status.page.startswith("http://127.0.0.1:")
        assert f"page       {status.page}\n" in words_of(run.directory.path, status)
        while not (now := (await client.get(f"{status.page}panels/now.json")).json())["live"]:
            await asyncio.sleep(0.05)
        assert now["state"] == "running" and now["step"] >= 1
        hold.unlink()
        await run.wait()
        with pytest.raises(httpx2.ConnectError):
            await client.get(status.page)


async def test_a_run_without_it_has_no_address(tmp_path: Path) -> None:
    display = NotedDisplay()
    async with opened_page(None, RunDirectory(tmp_path), display) as address:
        assert address == "" and not display.notes


async def test_a_port_in_use_is_a_warning(tmp_path: Path) -> None:
    folder, display = folder_of(tmp_path / "run", [record(1)]), NotedDisplay()
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        async with opened_page(listen, RunDirectory(folder), display) as address:
            assert address == "" and not display.notes
    [warning] = display.warnings
    assert f"page.listen={listen}: Address already in use" in warning
    assert "continues without it" in warning


async def test_a_page_that_fails_later_is_a_warning_and_cancels_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = asyncio.Event()

    @asynccontextmanager
    async def broken(*_: object) -> AsyncIterator[str]:
        async def fail() -> None:
            await failing.wait()
            raise ValueError("a defect")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
            yield "http://127.0.0.1:1/key/"

    monkeypatch.setattr(server, "served_page", broken)
    display = NotedDisplay()
    async with asyncio.timeout(PATIENCE_S), opened_page("0", RunDirectory(tmp_path), display) as address:
        assert display.notes == [f"page: {address}"]
        failing.set()
        while not display.warnings:
            await asyncio.sleep(0)
    assert len(display.warnings) == 1


def test_an_address_that_can_not_be_one_is_refused_before_the_start() -> None:
    with pytest.raises(ConfigError, match=r"page\.listen.*HOST:PORT"):
        resolve(str(TINY), ["page.listen=somewhere"])
