"""The screen of ``flexmarl top``, in textual's own harness: no terminal is needed."""

import asyncio
from pathlib import Path

import pytest
from textual.pilot import Pilot

from flexmarl.actors.names import Step
from flexmarl.actors.run_events import RunEnded, TrajectoryFailed
from flexmarl.launch.monitoring.page.recorded_run import RecordedRun
from flexmarl.launch.monitoring.top import top_app
from flexmarl.launch.monitoring.top.overview import Views, views_of
from flexmarl.launch.monitoring.top.top_app import TopApp
from flexmarl.launch.run_folder.json_lines import event_to_json

from ....patience import PATIENCE_S
from ...run_folder.records import record
from ..page.folders import STARTED, folder_of, lines_of

SIZE = (160, 50)


def screen_of(app: TopApp) -> str:
    """The characters on the screen."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


async def wait_for(pilot: Pilot[None], text: str) -> str:
    """Returns the screen as soon as ``text`` is on it."""
    app = pilot.app
    assert isinstance(app, TopApp)
    async with asyncio.timeout(PATIENCE_S):
        while text not in (screen := screen_of(app)):
            await pilot.pause(0.05)
    return screen


async def test_a_run_is_shown_and_each_change_of_it(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "first", [record(1)], [STARTED])
    async with TopApp(RecordedRun(folder)).run_test(size=SIZE) as pilot:
        await wait_for(pilot, "first · strict · step 1/9")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(lines_of([record(2)]))
        await wait_for(pilot, "step 2/9")
        with (folder / "events.jsonl").open("a") as file:
            file.write(lines_of([event_to_json(RunEnded(False, Step(2)))]))
        await wait_for(pilot, "This run has ended: done.")


def test_a_run_that_has_not_changed_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "first", [record(1)], [STARTED])
    app, reads = TopApp(RecordedRun(folder)), 0

    def counted(run: RecordedRun) -> Views:
        nonlocal reads
        reads += 1
        return views_of(run)

    monkeypatch.setattr(top_app, "views_of", counted)
    first = app._read()
    assert app._read() == app._read() == first and reads == 1
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(lines_of([record(2)]))
    assert "step 2/9" in app._read().sections[0].lines[0] and reads == 2


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
async def test_a_key_leaves_it(tmp_path: Path, key: str) -> None:
    app = TopApp(RecordedRun(folder_of(tmp_path, [record(1)])))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press(key)
        async with asyncio.timeout(PATIENCE_S):
            while app.is_running:
                await asyncio.sleep(0.02)
    assert app.return_code == 0


async def test_texts_of_others_are_neither_markup_nor_commands(tmp_path: Path) -> None:
    hostile = "[red]r[/red] [@click=app.quit]q[/] \x1b[2J \u202e :smile: [link=http://x]"
    events = [STARTED, event_to_json(TrajectoryFailed(Step(1), hostile, hostile, hostile))]
    async with TopApp(RecordedRun(folder_of(tmp_path, [record(1)], events))).run_test(size=SIZE) as pilot:
        screen = await wait_for(pilot, "[red]r[/red] [@click=app.quit]q[/] \\x1b[2J \\u202e :smile: [link=")
        assert "\x1b" not in screen and "\u202e" not in screen


async def test_a_folder_that_can_not_be_read_for_a_while_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(folder_of(tmp_path, [record(1)]))
    with monkeypatch.context() as patched:

        def away() -> None:
            raise OSError(5, "Input/output error", str(tmp_path))

        patched.setattr(run, "_read", away)
        async with TopApp(run).run_test(size=SIZE) as pilot:
            await wait_for(pilot, "Input/output error")
            patched.undo()
            await wait_for(pilot, "step 1/9")


async def test_many_agents_are_scrolled_by_keys(tmp_path: Path) -> None:
    agents = [f"agent-{number:03d}" for number in range(100)]
    config = "agents:\n" + "".join(f"  {name}: {{policy: {name}}}\n" for name in agents)
    app = TopApp(RecordedRun(folder_of(tmp_path, [record(1, agents=agents)], config=config)))
    async with app.run_test(size=(60, 20)) as pilot:
        assert "agent-099" not in await wait_for(pilot, "agent-000")
        await pilot.press("end")
        await wait_for(pilot, "agent-099")
