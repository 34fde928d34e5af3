"""The launcher's watch over its actors while they start and run."""

import asyncio
import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flexmarl.actors.run_events import ActorSilent, RunEvent, WorkflowBlocked
from flexmarl.core.errors import ActorDead
from flexmarl.core.system import ActorSystem
from flexmarl.launch.monitoring.console.run_console import RunConsole
from flexmarl.launch.run import actor_launcher
from flexmarl.launch.run.run_supervision import RunSupervision
from flexmarl.launch.run_folder.run_directory import RunDirectory

from ...patience import PATIENCE_S


class FakeCluster:
    """A supervision, a console and a clock: ``rounds`` gives the seconds of each round and the actors that answer."""

    def __init__(self, actors: list[str], rounds: Callable[[int], tuple[float, set[str]]]) -> None:
        self.now_s = 0.0
        self.running = actors
        self.processes: dict[str, object] = {}
        self.events: list[tuple[str, float]] = []
        self.phases: list[tuple[str, int, int]] = []
        self.lines: list[str] = []
        self.blocked = {"rollout-0": Path("nowhere")}
        self.is_still = False
        self.restarts = Counter[str]()
        self._rounds = rounds
        self._round = -1

    async def process_statistics(self, reported: object) -> dict[str, object]:
        await asyncio.sleep(0)
        self._round += 1
        seconds, names = self._rounds(self._round)
        self.now_s += seconds
        return dict.fromkeys(names)

    def end_silent(self, error: ActorDead) -> None:
        raise error

    def process_heard(self, name: str, figures: object) -> None:
        raise AssertionError("this supervision reports nothing")

    def refresh(self, processes: dict[str, object]) -> None:
        self.processes = processes

    async def event(self, event: RunEvent) -> None:
        if isinstance(event, WorkflowBlocked):
            self.lines.append(event.line)
            return
        assert isinstance(event, ActorSilent)
        self.events.append((event.actor, event.seconds))

    async def phase(self, text: str, done: int, total: int) -> None:
        self.phases.append((text, done, total))

    async def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(actor_launcher, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(actor_launcher, "_STATISTICS_INTERVAL_S", 0)
        async with asyncio.timeout(PATIENCE_S):
            watching = actor_launcher._watch_processes(
                cast(RunSupervision, self), cast(RunConsole, self), 300.0, self.blocked, lambda: self.is_still
            )
            await watching


async def test_an_actor_that_never_answered_is_named_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(["store", "trainer"], lambda _: (11.0, {"store"}))
    with pytest.raises(ActorDead, match="actor trainer died: .* has not answered for 308 s"):
        await cluster.watch(monkeypatch)
    assert cluster.events == [("trainer", 22.0)]


async def test_silence_is_counted_in_seconds_not_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds may be short, if an actor's calls fail at once, and long."""
    cluster = FakeCluster(["store"], lambda round_: (0.5 if round_ < 40 else 15.0, set()))
    with pytest.raises(ActorDead, match="has not answered for 305 s"):
        await cluster.watch(monkeypatch)


async def test_time_in_which_the_launcher_was_stopped_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that was stopped for an hour finds its own timers due: the actors were well all the time."""

    def rounds(number: int) -> tuple[float, set[str]]:
        if number == 20:
            raise InterruptedError("enough seen")
        return (3600.0, set()) if number in (5, 10) else (1.0, {"store"})

    cluster = FakeCluster(["store"], rounds)
    with pytest.raises(InterruptedError):
        await cluster.watch(monkeypatch)
    assert cluster.events == []


async def test_one_that_was_silent_before_the_launcher_was_stopped_gets_its_whole_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Silent for 299 s, then for an hour in which the launcher was stopped, then for 2 s more."""
    seconds = [1.0] * 299 + [3600.0] + [1.0] * 10
    cluster = FakeCluster(["store"], lambda number: (seconds[number], set()))
    with pytest.raises(ActorDead, match="has not answered for 301 s"):
        await cluster.watch(monkeypatch)


async def test_starting_shows_how_many_are_ready_and_after_a_while_who_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = FakeCluster([], lambda _: (0.0, set()))
    monkeypatch.setattr(actor_launcher, "time", SimpleNamespace(monotonic=lambda: cluster.now_s))
    ready = {name: asyncio.Event() for name in ("store", "trainer", "rollout")}

    async def spawn(name: str) -> None:
        await ready[name].wait()

    spawned: dict[str, Coroutine[Any, Any, None]] = {name: spawn(name) for name in ready}
    starting = asyncio.create_task(actor_launcher._start_all(spawned, cast(RunConsole, cluster)))
    for name in ready:
        await _shown(cluster, len([event for event in ready.values() if event.is_set()]))
        if name == "trainer":
            cluster.now_s = 100.0
        ready[name].set()
    await starting
    assert cluster.phases == [
        ("starting actors", 0, 3),
        ("starting actors", 1, 3),
        ("starting actors (not yet: rollout)", 2, 3),
    ]


async def _shown(cluster: FakeCluster, done: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not cluster.phases or cluster.phases[-1][1] < done:
            await asyncio.sleep(0)


async def test_the_first_that_does_not_start_is_what_is_raised() -> None:
    cluster = FakeCluster([], lambda _: (0.0, set()))

    async def refuse() -> None:
        raise ActorDead("store", "no luck")

    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(ActorDead, match="no luck"):
        await actor_launcher._start_all({"trainer": wait(), "store": refuse()}, cast(RunConsole, cluster))


async def test_the_line_that_blocks_the_workflow_is_reported_once_and_with_the_death(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cluster = FakeCluster(["rollout-0"], lambda _: (11.0, set()))
    report = cluster.blocked["rollout-0"] = tmp_path / "blocked_line"
    report.write_text(json.dumps({"line": "workflow.py:3, in workflow: time.sleep(999)", "lasts": True}))
    with pytest.raises(
        ActorDead, match=r"for 308 s; the workflow blocks its event loop: workflow.py:3, in workflow"
    ):
        await cluster.watch(monkeypatch)
    assert cluster.lines == ["workflow.py:3, in workflow: time.sleep(999)"]


async def test_a_line_that_blocked_the_loop_earlier_is_not_named_with_the_death(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cluster = FakeCluster(["rollout-0"], lambda _: (11.0, set()))
    report = cluster.blocked["rollout-0"] = tmp_path / "blocked_line"
    report.write_text(json.dumps({"line": "workflow.py:3, in workflow: parse()", "lasts": False}))
    with pytest.raises(ActorDead, match=r"for 308 s$"):
        await cluster.watch(monkeypatch)
    assert cluster.lines == ["workflow.py:3, in workflow: parse()"], "it is reported all the same"


async def test_in_a_standstill_a_fifth_of_the_time_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(["store"], lambda _: (11.0, set()))
    cluster.is_still = True
    with pytest.raises(ActorDead, match="has not answered for 66 s"):
        await cluster.watch(monkeypatch)


async def test_the_silence_of_an_earlier_life_does_not_count_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is restarted between two looks, and its next life starts for long: the watch never sees it gone."""

    def rounds(number: int) -> tuple[float, set[str]]:
        cluster.restarts["rollout-0"] += number == 20
        return 10.0, set()

    cluster = FakeCluster(["rollout-0"], rounds)
    with pytest.raises(ActorDead, match="has not answered for 310 s"):
        await cluster.watch(monkeypatch)
    assert cluster.now_s > 20 * 10.0 + 300.0
    assert [actor for actor, _ in cluster.events] == ["rollout-0", "rollout-0"], (
        "each life's silence is reported"
    )


async def test_the_store_of_an_earlier_life_is_removed_by_a_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may be large: the launcher's loop has pings to answer."""
    threads: dict[object, int] = {}

    class Reserved(Exception):
        pass

    def no_specs(*_: object, continues: bool) -> None:
        assert continues, "its samples are forgotten"
        raise Reserved

    async def references() -> Any:
        return SimpleNamespace(store=SimpleNamespace(address="tcp://127.0.0.1:1"))

    remove = shutil.rmtree

    def removed(*args: Any, **options: Any) -> None:
        threads[args[0]] = threading.get_ident()
        remove(*args, **options)

    monkeypatch.setattr(shutil, "rmtree", removed)
    monkeypatch.setattr(actor_launcher, "actor_specs", no_specs)
    monkeypatch.setattr(actor_launcher.ActorLauncher, "_references", lambda run: references())
    directory = RunDirectory(tmp_path)
    directory.store.mkdir()
    (directory.store / "journal").write_text("rows of steps that are repeated")
    async with ActorSystem("launcher") as system:
        console: Any = SimpleNamespace(system=system)
        run = actor_launcher.ActorLauncher(cast(Any, None), directory, cast(Any, None), console, None, {})
        with pytest.raises(Reserved):
            await run._start_actors()
    assert threads[directory.store] != threading.get_ident()
    assert [*directory.store.iterdir()] == []
