"""Runs within a program: ``flexmarl.Run`` in the loop of these tests."""

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import flexmarl
from flexmarl.actors.errors import ConfigError
from flexmarl.actors.run_events import RunEnded
from flexmarl.core.errors import ActorDead, ActorFailed
from flexmarl.launch.config.config_reading import resolve, to_yaml
from flexmarl.launch.errors import Interrupted, ResumeRefused, RunDirectoryError
from flexmarl.launch.hosts import env
from flexmarl.launch.run.preflight import preflight
from flexmarl.launch.run.prepared_run import GivenConfig, resolve_given
from flexmarl.launch.run.run import Run
from flexmarl.launch.run_folder.json_lines import metrics_from_json

from ..patience import PATIENCE_S
from .conftest import NO_FINDINGS, SIMULATED, SOURCES, TINY, json_lines, wait_until
from .in_process import actors_in_tasks, end_of

FINDINGS = preflight._findings
# An actor that calls a lost one may fail before the loss is seen: both count as a loss.
LOSS = (ActorDead, ActorFailed)
ENDLESS = (*SIMULATED, "training.steps=100000")


@pytest.fixture(autouse=True)
def runtime_base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """All files of the runs' processes are in this folder; nothing is left in it."""
    before = {*psutil.Process().children(recursive=True)}  # of libraries, such as those that compile
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    monkeypatch.setattr(preflight, "_findings", lambda *_: NO_FINDINGS)
    with tempfile.TemporaryDirectory(prefix="r", dir=env.runtime_base()) as folder:
        monkeypatch.setenv("FLEXMARL_RUNTIME_BASE", folder)
        yield Path(folder)
        assert not list(Path(folder).iterdir())
    wait_until(lambda: {*psutil.Process().children(recursive=True)} <= before, "the end of all processes")


@pytest.fixture
def in_tasks() -> Iterator[None]:
    """Actors are tasks, not processes."""
    with actors_in_tasks():
        yield


@pytest.fixture(autouse=True)
async def _deadline() -> AsyncIterator[None]:
    async with asyncio.timeout(PATIENCE_S):
        yield


def run(name: str, *settings: str, **options: float) -> Run:
    return flexmarl.Run(TINY, settings=settings, name=name, **options)  # type: ignore[arg-type]  # seconds


def _process_wide() -> tuple[object, ...]:
    root = logging.getLogger()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    return (
        [signal.getsignal(number) for number in numbers],
        (root.level, list(root.handlers)),
        dict(os.environ),
        asyncio.get_event_loop_policy(),
        Path.cwd(),
    )


async def test_its_steps_and_events_are_those_of_its_files_and_nothing_else_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "_findings", FINDINGS)
    before = _process_wide()
    async with run("whole", *SIMULATED, "training.steps=3") as whole:
        events, reading = whole.events(), whole.steps()
        begun = whole.result
        assert begun is None
        steps = [step async for step in reading]
        assert _process_wide() == before
        assert whole.result is not None and whole.result.last_step == 3 and not whole.result.stopped
        assert [step async for step in whole.steps()] == [], "there are no later ones"
        assert await whole.wait() == await whole.stop() == whole.result
    assert _process_wide() == before
    lines = json_lines(whole.directory.metrics)
    assert steps == [metrics_from_json(line) for line in lines] and len(steps) == 3
    seen = [event async for event in events]
    assert isinstance(seen[-1], RunEnded) and seen[-1].step == 3
    written = [line["event"] for line in json_lines(whole.directory.events)]
    assert written == ["run_started", *(event.event for event in seen)]
    assert whole.directory.report.exists()
    with pytest.raises(RuntimeError, match="this Run has been used"):
        await whole.__aenter__()


@pytest.mark.usefixtures("in_tasks")
@pytest.mark.parametrize("settings", [(), ("network.listen=127.0.0.1",)], ids=["ipc", "tcp"])
async def test_two_at_once_and_a_third_one_afterwards(settings: tuple[str, ...]) -> None:
    async def trained(name: str, steps: int) -> list[int]:
        async with run(name, *SIMULATED, *settings, f"training.steps={steps}") as one:
            return [step.step async for step in one.steps()]

    both = await asyncio.gather(trained("a", 2), trained("b", 3))
    assert list(both) == [[1, 2], [1, 2, 3]]
    assert await trained("c", 1) == [1]


@pytest.mark.usefixtures("in_tasks")
async def test_stop_ends_it_after_the_steps_under_way_with_a_checkpoint() -> None:
    async with run("stopped", *ENDLESS) as stopped:
        result = None
        async for step in stopped.steps():
            if step.step == 2:
                result = await stopped.stop()
        assert result is not None and result.stopped and result.last_step >= 2
        assert Path(result.checkpoint).name == f"step_{result.last_step:06d}"
    assert json_lines(stopped.directory.events)[-1]["stopped"] is True


@pytest.mark.usefixtures("in_tasks")
async def test_leaving_the_block_stops_it_in_good_order() -> None:
    async with run("left", *ENDLESS) as left:
        async for _ in left.steps():
            break
    assert left.result is not None and left.result.stopped and Path(left.result.checkpoint).exists()


@pytest.mark.usefixtures("in_tasks")
async def test_it_is_resumed_from_its_newest_checkpoint() -> None:
    settings = [*SIMULATED, "training.steps=4"]
    async with run("resumed", *settings) as first:
        async for _ in first.steps():
            await first.stop()
    assert first.result is not None
    last = first.result.last_step
    async with flexmarl.Run.resume("runs/resumed", settings=["training.steps=6"]) as second:
        assert [step.step async for step in second.steps()] == list(range(last + 1, 7))
    assert [line["step"] for line in json_lines(second.directory.metrics)] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ResumeRefused, match="all 6 steps are trained"):
        async with flexmarl.Run.resume("runs/resumed"):
            pytest.fail("it has begun")


@pytest.mark.usefixtures("in_tasks")
async def test_an_error_of_the_block_stops_it_in_good_order_too() -> None:
    with pytest.raises(ZeroDivisionError):
        async with run("broken", *ENDLESS) as broken:
            async for _ in broken.steps():
                raise ZeroDivisionError
    assert broken.result is not None and broken.result.stopped


@pytest.mark.usefixtures("in_tasks")
async def test_steps_that_take_longer_than_the_bound_are_given_up(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.write_text("2")  # the workflows of the second step wait
    async with run("held", *ENDLESS, f"data.hold={hold}", stop_timeout_s=0.1) as held:
        async for _ in held.steps():
            break
    with pytest.raises(Interrupted, match="stopped by the end of its block"):
        _ = held.result
    assert json_lines(held.directory.events)[-1]["stopped"] is True


@pytest.mark.usefixtures("in_tasks")
async def test_a_cancelled_block_ends_at_once() -> None:
    inside = asyncio.Event()

    async def embed() -> None:
        async with run("cancelled", *ENDLESS) as cancelled:
            async for _ in cancelled.steps():
                inside.set()

    task = asyncio.create_task(embed())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.usefixtures("in_tasks")
async def test_one_that_is_stopped_before_it_begins_has_no_result() -> None:
    async with run("early", *ENDLESS) as early:
        assert await early.stop() is None
        assert [step async for step in early.steps()] == []
        with pytest.raises(Interrupted, match="stopped by the program"):
            await early.wait()


async def test_a_loss_before_the_checkpoint_of_a_stop_is_an_error() -> None:
    with pytest.raises((*LOSS, Interrupted), match="actor store died"):
        async with run("lost", *ENDLESS) as lost:
            await anext(lost.steps())
            _process_of("store").kill()


@pytest.mark.usefixtures("in_tasks")
@pytest.mark.parametrize("reads", [True, False])
async def test_its_error_is_raised_by_the_iteration_or_else_by_the_block(reads: bool) -> None:
    caught = []
    with pytest.raises(LOSS, match="actor store died") as raised:
        async with run("lost", *ENDLESS) as lost:
            steps = lost.steps()
            await anext(steps)
            end_of("store")
            if reads:
                try:
                    async for _ in steps:
                        pass
                except LOSS as error:
                    caught.append(error)
                    raise
            assert lost._life is not None
            await asyncio.wait([lost._life])
    assert caught == [raised.value] * reads
    assert "actor store died" in json_lines(lost.directory.events)[-1]["error"]


def _process_of(actor: str) -> psutil.Process:
    """The last words of an actor's command line are its directory and its name."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if " ".join(process.cmdline()).split()[-1:] == [actor]:
                return process
    raise AssertionError(f"there is no process of {actor}")


class TestItsConfig:
    @pytest.mark.parametrize("form", ["mapping", "file", "config"])
    async def test_may_be_a_mapping_a_file_or_a_config(self, form: str, tmp_path: Path) -> None:
        """Each is the same run as the recipe's with these settings."""
        config = resolve(str(TINY), SIMULATED)
        file = tmp_path / "given.yaml"
        file.write_text(to_yaml(config))
        forms: dict[str, GivenConfig] = {
            "mapping": config.model_dump(mode="json"),
            "file": file,
            "config": config,
        }
        given = forms[form]
        assert resolve_given(given, ["training.steps=7"])[0] == resolve(
            str(TINY), [*SIMULATED, "training.steps=7"]
        )

    async def test_is_refused_with_every_mistake_and_nothing_is_written(self, tmp_path: Path) -> None:
        for config, words in (
            ({"agents": {"a": {}}}, "the given config has no key recipe"),
            (resolve(str(TINY), SIMULATED).model_dump() | {"training": {"steps": -1}}, r"training.steps=-1"),
            ("nowhere", "no recipe 'nowhere'"),
        ):
            with pytest.raises(ConfigError, match=words):
                async with flexmarl.Run(config):
                    pytest.fail("it has begun")
        assert not list(tmp_path.glob("runs/*"))

    async def test_a_name_is_used_once(self, tmp_path: Path) -> None:
        (tmp_path / "runs" / "taken").mkdir(parents=True)
        with pytest.raises(RunDirectoryError, match="taken exists already"):
            async with run("taken", *SIMULATED):
                pytest.fail("it has begun")
