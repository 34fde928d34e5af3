"""A run and its resumed half with functions as sinks, one of which raises; sinks that are refused."""

import asyncio
import functools
import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import flexmarl
from flexmarl.actors.errors import ConfigError
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.config.written_config import UNCHANGED
from flexmarl.launch.hosts import env
from flexmarl.launch.monitoring.sinks.function_sink import check_function, name_of
from flexmarl.launch.run.preflight import preflight
from flexmarl.launch.run.preflight.recipe_checks import function_problems
from flexmarl.launch.run.resuming import may_change
from flexmarl.launch.run_folder.run_history import load_history

from ....patience import PATIENCE_S
from ...conftest import NO_FINDINGS, SIMULATED, SOURCES, TINY, json_lines
from ...in_process import actors_in_tasks

SEND = """
def send(step, figures):
    with open({!r}, "a") as file:
        file.write(f"{{step}} {{sorted(figures)[0]}}\\n")
"""


@pytest.fixture(autouse=True)
def _folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    monkeypatch.setattr(preflight, "_findings", lambda *_: NO_FINDINGS)
    with tempfile.TemporaryDirectory(prefix="r", dir=env.runtime_base()) as folder:
        monkeypatch.setenv("FLEXMARL_RUNTIME_BASE", folder)
        yield


def recipe_with(file: str, folder: Path) -> Path:
    """A copy of the tiny recipe, with ``metrics.py``."""
    recipe = folder / "tiny"
    recipe.mkdir()
    for path in TINY.iterdir():
        (recipe / path.name).symlink_to(path)
    (recipe / "metrics.py").write_text(file)
    return recipe


async def test_a_run_and_its_resumed_half_feed_all_their_sinks(tmp_path: Path) -> None:
    recipe = recipe_with(SEND.format(str(tmp_path / "sent")), tmp_path)
    seen: list[int] = []

    def collect(step: int, figures: Mapping[str, float]) -> None:
        seen.append(step)

    def broken(step: int, figures: Mapping[str, float]) -> None:
        raise RuntimeError("no service")

    settings = (*SIMULATED, "training.steps=2", "checkpoint.every=2", "sinks=[metrics.py:send]")
    async with asyncio.timeout(PATIENCE_S):
        with actors_in_tasks():
            async with flexmarl.Run(
                str(recipe), settings=settings, name="fed", sinks=[collect, broken]
            ) as run:
                result = await run.wait()
        assert result.last_step == 2
        events = json_lines(run.directory.events)
        with actors_in_tasks():
            async with flexmarl.Run.resume("runs/fed", settings=["training.steps=3"]) as resumed:
                await resumed.wait()
    assert may_change("sinks") and not may_change("seed")
    assert seen == [0, 1, 2, 2], "evaluations before training and at the end, and the steps"
    sent = [line.split() for line in (tmp_path / "sent").read_text().splitlines()]
    assert [int(step) for step, _ in sent] == [0, 1, 2, 2, 3, 3]
    failed = [event for event in events if event["event"] == "sink_failed"]
    assert [event["error"] for event in failed] == ["RuntimeError: no service"]
    closed = {event["sink"]: event["lost"] for event in events if event["event"] == "sink_closed"}
    assert sorted(closed.values()) == [0, 0, 4]
    assert events[-1]["event"] == "run_ended", "also after sinks"
    assert len(load_history(run.directory.path).steps) == 3


# --------------------------------------------------------------------------- refusals


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = resolve(str(TINY), [*SIMULATED, "sinks=[tensorboard, {name: prometheus, port: 9000}]"])
    with pytest.raises(ConfigError) as caught:
        preflight.check_before_start(config, UNCHANGED)
    assert str(caught.value).splitlines()[1:] == [
        "  sinks.0.name=tensorboard: tensorboard is not installed: pip install 'flexmarl[tensorboard]'",
        "  sinks.1.name=prometheus: prometheus_client is not installed: pip install 'flexmarl[prometheus]'",
    ]


def test_a_partial_and_an_object_that_is_called_are_functions_too() -> None:
    def to(place: str, step: int, figures: Mapping[str, float]) -> None: ...

    class Page:
        def __call__(self, step: int, figures: Mapping[str, float]) -> None: ...

    class Slow:
        async def __call__(self, step: int, figures: Mapping[str, float]) -> None: ...

    names = [name_of(check_function(one, "sinks[0]")) for one in (functools.partial(to, "here"), Page())]
    assert names == ["partial", f"{Page.__qualname__}"]
    with pytest.raises(ConfigError, match="is async"):
        check_function(Slow(), "sinks[0]")


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("def other(step, figures): ...", "metrics.py has no function 'send'"),
        ("async def send(step, figures): ...", "metrics.py:send is async"),
        ("def send(figures): ...", "metrics.py:send: too many positional arguments"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
    ],
)
def test_a_function_that_can_not_be_called_is_named(file: str, problem: str, tmp_path: Path) -> None:
    recipe = recipe_with(file, tmp_path)
    config = resolve(str(recipe), [*SIMULATED, "sinks=[metrics.py:send]"])
    [found] = function_problems(config)
    assert found.startswith("sinks.0.function=metrics.py:send: ") and problem in found


@pytest.mark.parametrize(
    "entry",
    ["tensorflow", "{name: wandb, modes: offline}", "other:send", "{name: prometheus, port: 70000}"],
)
def test_an_unknown_sink_or_key_is_refused_by_its_name(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"sinks\.1"):
        resolve(str(TINY), [*SIMULATED, f"sinks=[metrics.py:send, {entry}]"])


def test_the_same_sink_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="wandb is there twice"):
        resolve(str(TINY), [*SIMULATED, "sinks=[wandb, {name: wandb, mode: offline}]"])
