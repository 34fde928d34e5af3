"""The end of a run that was asked to stop, and stands still."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flexmarl.core.testing import virtual_time
from flexmarl.launch.run.run import Run
from flexmarl.launch.run.run_feed import Pulse
from flexmarl.launch.run.run_supervision import RunSupervision
from flexmarl.launch.run.stalls.standstill import Standstill

CAUSE = "trainer (process 7) does not answer"


class House:
    """The part of a run that decides: its standstill is looked at once a second."""

    def __init__(self) -> None:
        self.standstill = Standstill(30.0)
        self.observed = Pulse()
        self.causes: tuple[str, ...] = ()
        self.asked = 0
        self.done = 0
        self.warnings: list[str] = []
        supervision = SimpleNamespace(stop_patience_s=10.0)
        config = SimpleNamespace(supervision=supervision)
        self.run = SimpleNamespace(
            _prepared=SimpleNamespace(life=SimpleNamespace(config=config)),
            _stop_asked=asyncio.Event(),
            _at_once=asyncio.Event(),
            _stalls=self,
            _broadcast=SimpleNamespace(warn=self._warn),
        )

    async def ask(self, supervision: RunSupervision) -> tuple[str, ...]:
        self.asked += 1
        return (CAUSE,)

    def _warn(self, text: str, *, at_once: bool) -> None:
        assert at_once, "the run is about to end"
        self.warnings.append(text)

    async def look(self, seconds: int, *, working_every: int = 0) -> None:
        for second in range(seconds):
            await asyncio.sleep(1.0)
            self.done += bool(working_every) and second % working_every == 0
            self.standstill.observe({"a": self.done}, asyncio.get_running_loop().time())
            self.observed.beat()
        await asyncio.sleep(0)

    def ends(self) -> bool:
        return bool(self.run._at_once.is_set())


@pytest.fixture
def in_house() -> Callable[[Callable[[House], Any]], None]:
    def run(body: Callable[[House], Any]) -> None:
        async def main() -> None:
            house = House()
            ending = asyncio.create_task(
                Run._end_standstill(cast(Run, house.run), cast(RunSupervision, house))
            )
            await body(house)
            ending.cancel()
            await asyncio.wait([ending])

        virtual_time.run(main())

    return run


def test_one_that_stands_still_ends_after_the_patience_with_its_causes(in_house: Any) -> None:
    async def body(house: House) -> None:
        await house.look(5)
        house.run._stop_asked.set()
        await house.look(4)
        assert not house.ends()
        await house.look(8)
        assert house.ends()
        assert house.warnings == [f"stopping at once: nothing has ended for 10 s; {CAUSE}"]

    in_house(body)


def test_one_that_stood_still_before_ends_at_once_and_its_causes_are_not_named_again(in_house: Any) -> None:
    async def body(house: House) -> None:
        await house.look(40)
        house.causes = (CAUSE,)
        assert not house.ends(), "it was not asked to stop"
        house.run._stop_asked.set()
        await asyncio.sleep(0.1)
        assert house.ends() and not house.asked
        assert house.warnings == ["stopping at once: nothing has ended for 39 s"]

    in_house(body)


def test_one_that_works_goes_on_to_its_last_checkpoint(in_house: Any) -> None:
    async def body(house: House) -> None:
        await house.look(20, working_every=4)
        house.run._stop_asked.set()
        await house.look(300, working_every=8)
        assert not house.ends() and not house.warnings

    in_house(body)


def test_one_whose_work_items_are_long_gets_three_times_the_longest(in_house: Any) -> None:
    async def body(house: House) -> None:
        await house.look(60, working_every=15)
        house.run._stop_asked.set()
        await house.look(30)
        assert house.standstill.idle_s > 40.0 and not house.ends()
        await house.look(10)
        assert house.ends()

    in_house(body)
