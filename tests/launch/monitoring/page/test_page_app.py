"""The server of the page: its key, its headers, its answers, and its news of a run that grows."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.errors import RunDirectoryError
from flexmarl.launch.monitoring.page import changes
from flexmarl.launch.monitoring.page.page_app import WEB
from flexmarl.launch.monitoring.page.server import served_page
from flexmarl.launch.monitoring.timeline.timeline import Timeline

from ....patience import PATIENCE_S
from ...run_folder.records import record
from ...run_folder.samples.files import record as samples_record
from ...run_folder.samples.files import recorded_run, trajectory
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


async def test_a_page_too_many_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "MOST_LISTENERS", 1)
    async with page_of(folder_of(tmp_path, [record(1)])) as client:
        async with client.stream("GET", "changes") as first:
            assert first.status_code == 200
            refused = await client.get("changes")
            assert refused.status_code == 503 and "1 pages of this server are open" in refused.text
            assert refused.headers["retry-after"] and "content-security-policy" in refused.headers
        async with asyncio.timeout(PATIENCE_S):
            while True:  # the server notices the end of a connection in its own time
                async with client.stream("GET", "changes") as later:
                    if later.status_code == 200:
                        break


@pytest.mark.parametrize("path", ["panels/now.json", "panels/trajectories.json", "curves"])
async def test_numbers_of_any_length_in_an_address_are_answered_with_a_sentence(
    tmp_path: Path, path: str
) -> None:
    async with page_of(folder_of(tmp_path, [record(1)])) as client:
        answer = await client.get(path, params={"run": "9" * 5000})
        assert answer.status_code == 400 and "is not the place of a run" in answer.json()["error"]
        assert len(answer.text) < 200


@pytest.mark.parametrize("step", [str(2**63), "9" * 5000])
async def test_a_step_or_span_beyond_all_numbers_is_answered_with_a_sentence(
    tmp_path: Path, step: str
) -> None:
    run = recorded_run(tmp_path / "run", [samples_record(trajectory(1, 1, 0))]).path
    async with page_of(folder_of(run, [record(1)])) as client:
        for name in (f"{step}t0.q1", f"1t{step}.q1"):
            answer = await client.get("panels/trajectories.json", params={"of": name})
            assert answer.status_code == 400 and "more than 18 digits" in answer.json()["error"]
        assert (await client.get("panels/trajectories.json", params={"step": step})).status_code == 200
        assert (await client.get("panels/timeline.json", params={"span": step})).json()["error"]
        assert (await client.get("curves", params={"keys": "tokens", "first": step})).status_code == 200


async def test_other_panels_answer_while_the_timeline_is_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, released = threading.Event(), threading.Event()

    def wait(timeline: Timeline, number: int) -> dict[str, str]:
        reading.set()
        assert released.wait(PATIENCE_S)
        return {"of": str(number)}

    monkeypatch.setattr(Timeline, "span", wait)
    async with page_of(folder_of(tmp_path, [record(1)])) as client, asyncio.TaskGroup() as tasks:
        span = tasks.create_task(client.get("panels/timeline.json", params={"span": "3"}))
        assert await asyncio.to_thread(reading.wait, PATIENCE_S)
        try:
            assert (await client.get("panels/now.json")).json()["step"] == 1
            assert not span.done()
        finally:
            released.set()
        assert (await span).json() == {"of": "3"}
