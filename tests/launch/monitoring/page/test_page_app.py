"""The server of the page: its key, its headers, its answers, and its news of a run that grows."""

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.errors import RunDirectoryError
from flexmarl.launch.monitoring.page.page_app import WEB
from flexmarl.launch.monitoring.page.server import served_page

from ....patience import PATIENCE_S
from ..report.records import record
from .folders import folder_of, lines_of, step_line


@asynccontextmanager
async def page_of(*folders: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a page of these runs."""
    async with (
        served_page(folders, "127.0.0.1:0") as address,
        httpx2.AsyncClient(base_url=address, timeout=PATIENCE_S) as client,
    ):
        yield client


async def test_nothing_is_shown_without_the_key(tmp_path: Path) -> None:
    async with page_of(folder_of(tmp_path, [record(1)])) as client:
        assert (await client.get("")).status_code == 200
        root = str(client.base_url).rstrip("/").rpartition("/")[0]
        for path in ("/", "/wrong/", "/wrong/page.json", "//page.json", "/%ff/page.json", "/../page.json"):
            answer = await client.get(f"{root}{path}")
            assert answer.status_code == 403 and "the whole address" in answer.text
            assert "content-security-policy" in answer.headers


async def test_it_can_be_read_only(tmp_path: Path) -> None:
    async with page_of(folder_of(tmp_path, [record(1)])) as client:
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert (await client.request(method, "page.json")).status_code == 405
        assert (await client.get("../../etc/passwd")).status_code in (403, 404)
        assert (await client.get("panels/%2e%2e/main.py")).status_code == 404


async def test_the_policy_forbids_other_addresses_and_scripts(tmp_path: Path) -> None:
    async with page_of(folder_of(tmp_path, [record(1)])) as client:
        answer = await client.get("")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert "trusted-types 'none'" in policy and answer.headers["referrer-policy"] == "no-referrer"
        assert "http:" not in answer.text and "https:" not in answer.text


async def test_every_file_of_the_page_is_served_as_its_kind(tmp_path: Path) -> None:
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
    async with page_of(folder_of(tmp_path, [record(1)])) as client:
        for path in WEB.rglob("*.*"):
            answer = await client.get(str(path.relative_to(WEB)))
            assert answer.content == path.read_bytes()
            assert answer.headers["content-type"].startswith(kinds[path.suffix])


def test_the_page_is_small() -> None:
    assert sum(path.stat().st_size for path in WEB.rglob("*") if path.is_file()) < 300_000


async def test_views_and_curves_are_of_the_run_that_is_named(tmp_path: Path) -> None:
    folders = [
        folder_of(tmp_path / name, [record(1, tokens=tokens)]) for name, tokens in (("a", 1), ("b", 2))
    ]
    async with page_of(*folders) as client:
        facts = (await client.get("page.json")).json()
        assert [run["name"] for run in facts["runs"]] == ["a", "b"]
        curves = (await client.get("curves", params={"run": 1, "keys": "tokens\nloss/sorter"})).json()
        assert curves["tokens"] == {"steps": [1], "mean": [2]} and curves["loss/sorter"]["mean"] == [0.01]
        assert (await client.get("panels/now.json", params={"run": 1})).json()["step"] == 1
        for run in ("2", "-1", "x", ""):
            answer = await client.get("panels/now.json", params={"run": run})
            assert answer.status_code == 404 and "there is no run" in answer.json()["error"]


async def test_a_run_that_grows_is_announced(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [record(1)])
    async with page_of(folder) as client, client.stream("GET", "changes") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line async for line in answer.aiter_lines() if line.startswith("data:"))
        first = json.loads((await anext(lines)).removeprefix("data:"))
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(lines_of([record(2)]))
        second = json.loads((await anext(lines)).removeprefix("data:"))
        assert second[0] > first[0]
        assert (await client.get("panels/now.json")).json()["step"] == 2


async def test_texts_of_others_come_as_json_with_their_control_characters_shown(tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror=alert(1)>\x1b[2J\u202e"
    async with page_of(folder_of(tmp_path, [step_line(1, {f"workflow/{hostile}": 1.0})])) as client:
        answer = await client.get("panels/figures.json")
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "\x1b" not in answer.text and "\u202e" not in answer.text


async def test_a_port_in_use_and_a_folder_of_no_run_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [record(1)])
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match="choose another port"):
            async with served_page([folder], f"127.0.0.1:{port}"):
                pass
    with pytest.raises(ConfigError, match="HOST:PORT"):
        async with served_page([folder], "somewhere"):
            pass
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        async with served_page([tmp_path / "missing"], "127.0.0.1:0"):
            pass
