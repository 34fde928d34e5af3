"""The lag of the event loop, and log lines that name the request they belong to."""

import asyncio
import errno
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from flexmarl.core import telemetry
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem
from flexmarl.core.telemetry import (
    LOG_LEVELS,
    BoundedLog,
    LoopLag,
    ProcessUsage,
    configure_logging,
    delivery_context,
    get_logger,
    process_usage,
)
from flexmarl.core.testing import virtual_time
from flexmarl.launch.hosts import env

from .relay import Relay

SOURCES = Path(__file__).parents[2] / "scripts" / "src"


async def test_a_blocked_loop_shows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_LAG_INTERVAL_S", 0.25)
    lag = LoopLag()
    begun_ms = lag.read_ms()
    await asyncio.sleep(0)
    time.sleep(0.6)  # noqa: ASYNC251  # blocks the loop on purpose
    for _ in range(3):  # the late timer runs
        await asyncio.sleep(0)
    statistics = process_usage(lag)
    assert statistics.loop_lag_ms >= 300
    assert statistics.pid == os.getpid() and statistics.rss_mib > 1 and statistics.cpu_s > 0
    assert max(begun_ms, lag.read_ms()) < statistics.loop_lag_ms
    lag.close()


def test_a_process_in_virtual_time_has_no_memory_of_its_own() -> None:
    async def read() -> ProcessUsage:
        lag = LoopLag()
        usage = process_usage(lag)
        lag.close()
        return usage

    assert virtual_time.run(read()) == ProcessUsage(os.getpid(), 0.0, 0.0, 0.0)


@pytest.fixture
def default_structlog() -> Iterator[None]:
    """structlog as a process of its own finds it, and afterwards as the other tests need it."""
    known = structlog.get_config()
    structlog.reset_defaults()
    yield
    structlog.configure(**known)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.usefixtures("default_structlog")
class TestOwnProcesses:
    def test_a_log_on_a_full_disk_fails_nobody(self) -> None:
        configure_logging("store", FullDisk())
        get_logger("flexmarl.core.x").error("no room")

    def test_lines_in_files_are_json(self) -> None:
        stream = io.StringIO()
        configure_logging("store", stream)
        log = get_logger("flexmarl.core.x")
        log.debug("not this")
        log.info("ready", port=3)
        try:
            raise OSError("no space")
        except OSError:
            log.exception("failed", path=Path("x"), node="another")
        first, second = map(json.loads, stream.getvalue().splitlines())
        assert first.items() >= {"event": "ready", "port": 3, "level": "info", "node": "store"}.items()
        assert first["timestamp"].endswith("Z")
        assert "OSError: no space" in second["exception"] and second["node"] == "another"

    def test_the_least_level_is_a_choice(self) -> None:
        counts = {}
        for level in LOG_LEVELS:
            stream = io.StringIO()
            configure_logging("store", stream, level)
            log = get_logger("flexmarl.core.x")
            for method in (log.debug, log.info, log.warning, log.error):
                method("a line")
            counts[level] = len(stream.getvalue().splitlines())
        assert counts == {"debug": 4, "info": 3, "warning": 2, "error": 1}

    def test_lines_on_a_terminal_are_readable(self) -> None:
        stream = Terminal()
        configure_logging("store", stream)
        try:
            raise OSError("no space")
        except OSError:
            get_logger("flexmarl.core.x").exception("writing failed", path="x")
        text = stream.getvalue()
        assert "writing failed" in text and "OSError: no space" in text
        with pytest.raises(ValueError):
            json.loads(text.splitlines()[0])


class TestTheRequestIsNamed:
    async def test_through_three_processes(
        self, system: ActorSystem, supervisor: Supervisor, tmp_path: Path
    ) -> None:
        names = ["first", "second", "third"]
        await asyncio.gather(*(supervisor.spawn("relay:Relay", name, {}) for name in names))
        first, *others = [supervisor.reference(name, Relay) for name in names]
        for _ in range(2):
            await first.api.hand_on(others)
        lines = {name: _json_lines(tmp_path / f"{name}.log") for name in names}
        for name, sender in zip(names, [system.name, *names], strict=False):
            unbound, *bound = lines[name]
            assert unbound["event"] == "started without a request" and unbound["node"] == name
            assert not {"trace_id", "message_id", "actor"} & unbound.keys()
            assert [line["event"] for line in bound] == ["handing on", "in a task", "back"] * 2
            assert {(line["actor"], line["node"]) for line in bound} == {(name, name)}
            assert all(line["message_id"].startswith(f"{sender}:") for line in bound)
            assert len({line["message_id"] for line in bound}) == 2
        traces = [[line["trace_id"] for line in lines[name][1:]] for name in names]
        assert traces[0] == traces[1] == traces[2]
        assert len(set(traces[0])) == 2 and len(traces[0][0]) == 16

    async def test_in_a_service_that_asks_for_it(self, system: ActorSystem) -> None:
        with structlog.testing.capture_logs(processors=[delivery_context]) as lines:
            relay = await system.add(Relay(), "relay")
            await relay.api.hand_on([])
            await relay.api.log_as_another()
        started, *served, explicit = lines
        assert "trace_id" not in started
        assert {(line["actor"], line["node"]) for line in served} == {("relay", system.name)}
        assert len({(line["message_id"], line["trace_id"]) for line in served}) == 1
        assert explicit["actor"] == "another" and explicit["trace_id"] != served[0]["trace_id"]

    async def test_two_systems_never_begin_the_same_trace(self) -> None:
        with structlog.testing.capture_logs(processors=[delivery_context]) as lines:
            async with ActorSystem("one") as one, ActorSystem("another") as another:
                for system in (one, another):
                    relay = await system.add(Relay(), "relay")
                    for _ in range(20):
                        await relay.api.log_as_another()
        assert len({line["trace_id"] for line in lines if "trace_id" in line}) == 40


SERVICE = """
import asyncio, json, logging, sys
import structlog

records, raised = [], []
class Keep(logging.Handler):
    def emit(self, record):
        records.append([record.name, record.levelname, record.getMessage(), record.funcName, record.flexmarl])
        raised.append(record.exc_info[0].__name__ if record.exc_info else "")
if "standard" in sys.argv:
    logging.basicConfig(handlers=[Keep()], level=logging.WARNING)

def globals_now():
    root = logging.root
    return [logging.getLoggerClass().__name__, logging.lastResort is not None, root.level, len(root.handlers),
            logging.raiseExceptions, logging.root.manager.disable, structlog.is_configured()]

before = globals_now()
from flexmarl.core.system import ActorSystem
from flexmarl.core.telemetry import get_logger
log = get_logger("flexmarl.core.x")

async def main():
    async with ActorSystem("service") as system:
        await system.ref("missing", system.address).tell("hear", 1)
        await system.process_statistics()
        log.info("not this")
        log.error("one field", name="a", args=[1], message="%s")
        try:
            1 / 0
        except ZeroDivisionError:
            log.exception("failed", actor="a")

asyncio.run(main())
print(json.dumps({"before": before, "after": globals_now(), "records": records, "raised": raised}))
"""


class TestServicesThatEmbed:
    def _run(self, *arguments: str) -> tuple[dict[str, Any], str]:
        environment = {**env.actor_environment(), "PYTHONPATH": str(SOURCES)}
        command = [sys.executable, "-c", SERVICE, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout), done.stderr  # our lines are not on its standard output

    def test_keep_their_logging(self) -> None:
        result, errors = self._run("standard")
        assert result["before"] == result["after"]
        assert not result["after"][-1], "structlog has been configured"
        assert not errors
        (name, level, text, _, fields), mine, failed = result["records"]
        assert (name, level) == ("flexmarl.core.delivery.inbound", "WARNING")
        assert text.startswith("one-way message for an unknown actor ") and "endpoint='hear'" in text
        assert fields["actor"] == "missing"
        fields = {"name": "a", "args": [1], "message": "%s"}
        words = "one field name='a' args=[1] message='%s'"
        assert mine == ["flexmarl.core.x", "ERROR", words, "main", fields]
        assert failed == ["flexmarl.core.x", "ERROR", "failed actor='a'", "main", {"actor": "a"}]
        assert result["raised"] == ["", "", "ZeroDivisionError"]

    def test_see_warnings_where_they_have_no_logging(self) -> None:
        result, errors = self._run()
        assert result["before"] == result["after"]
        assert errors.splitlines()[0].startswith("one-way message for an unknown actor ")
        assert "not this" not in errors and "one field" in errors


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestBoundedLog:
    def test_each_key_has_lines_of_its_own_until_there_are_too_many(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: now)
        monkeypatch.setattr(telemetry, "_MOST_PERIODS", 3)
        bounded = BoundedLog(get_logger("flood"), lines=1, period_s=60.0)
        with structlog.testing.capture_logs() as lines:
            for _ in range(2):
                for address in ("a", "b", "c", "d", "e"):
                    bounded.warning("refused", key=address, address=address)
            assert [line["address"] for line in lines] == ["a", "b", "c", "d"], "the new ones share a line"
            now += 60.0
            bounded.warning("refused", key="f", address="f")
            assert lines[-2] == {"event": "refused", "log_level": "warning", "not_logged": 6}
            assert lines[-1]["address"] == "f", "old keys are forgotten"
            bounded.close()
        assert len(lines) == 6

    def test_a_flood_is_counted_and_not_logged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: now)
        bounded = BoundedLog(get_logger("flood"), lines=3, period_s=60.0)
        with structlog.testing.capture_logs() as lines:
            for number in range(1000):
                bounded.warning("message refused", number=number)
            bounded.error("another event")
            assert [line.get("number") for line in lines] == [0, 1, 2, None]
            assert lines[2]["further"] == "counted and not logged for 60 s"
            now += 60.0
            bounded.warning("message refused", number=1000)
            assert (lines[-1]["number"], lines[-1]["not_logged"]) == (1000, 997)
            for _ in range(5):
                bounded.warning("message refused")
            bounded.close()
            bounded.close()
        assert lines[-1] == {"event": "message refused", "log_level": "warning", "not_logged": 3}
        assert len(lines) == 8
