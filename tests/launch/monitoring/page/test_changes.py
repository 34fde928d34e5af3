"""News of runs that grow, for the pages that are open."""

import asyncio
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest

from flexmarl.launch.monitoring.page import changes
from flexmarl.launch.monitoring.page.changes import Changes, TooManyListeners
from flexmarl.launch.monitoring.page.recorded_run import RecordedRun

from ...run_folder.records import record
from .folders import folder_of


class CountedRun(RecordedRun):
    looks = 0

    def refresh(self) -> int:
        self.looks += 1
        return super().refresh()


async def test_any_number_of_pages_costs_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_LOOK_S", 1e6)
    run = CountedRun(folder_of(tmp_path, [record(1)]))
    news_of = Changes([run])
    async with AsyncExitStack() as stack:
        watched = [await stack.enter_async_context(news_of.watched()) for _ in range(50)]
        assert await asyncio.gather(*map(anext, watched)) == [[1]] * 50
    assert run.looks == 1
    await news_of.revisions()
    assert run.looks == 2, "a page that is loaded gets the newest"


def test_pages_beyond_the_bound_are_refused_until_one_is_closed() -> None:
    news_of = Changes([])
    with ExitStack() as stack:
        for _ in range(changes.MOST_LISTENERS):
            stack.enter_context(news_of.listening())
        with pytest.raises(TooManyListeners, match="200 pages of this server are open"), news_of.listening():
            pass
    with news_of.listening():
        pass
