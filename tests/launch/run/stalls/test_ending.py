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


class FakeCluster:
    """The part of a run that decides: its standstill is looked at once a second."""

    def __init__(self) -> None:
        self.standstill = Standstill(30.0)
        self.observed = Pulse()
        self.causes: tuple[str, ...] = ()
        self.asked = 0
        self.done = 0
        self.warnings: list[str] = []
        supervision = SimpleNamespace(stop_patience_s=10.0)
        self.gateway = SimpleNamespace(listen=None, stop_s=20.0)
        config = SimpleNamespace(supervision=supervision, gateway=self.gateway)
        self.run = SimpleNamespace(
            _prepared=SimpleNamespace(start=SimpleNamespace(config=config)),
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
def in_cluster() -> Callable[[Callable[[FakeCluster], Any]], None]:
    def run(body: Callable[[FakeCluster], Any]) -> None:
        async def main() -> None:
            cluster = FakeCluster()
            ending = asyncio.create_task(
                Run._end_standstill(cast(Run, cluster.run), cast(RunSupervision, cluster))
            )
            await body(cluster)
            ending.cancel()
            await asyncio.wait([ending])

        virtual_time.run(main())

    return run


def test_one_that_stands_still_ends_after_the_patience_with_its_causes(in_cluster: Any) -> None:
    async def body(cluster: FakeCluster) -> None:
        await cluster.look(5)
        cluster.run._stop_asked.set()
        await cluster.look(4)
        assert not cluster.ends()
        await cluster.look(8)
        assert cluster.ends()
        assert cluster.warnings == [f"stopping at once: nothing has ended for 10 s; {CAUSE}"]

    in_cluster(body)


def test_one_that_stood_still_before_ends_when_newer_counts_show_it_and_its_causes_are_not_named_again(
    in_cluster: Any,
) -> None:
    async def body(cluster: FakeCluster) -> None:
        await cluster.look(40)
        cluster.causes = (CAUSE,)
        assert not cluster.ends(), "it was not asked to stop"
        cluster.run._stop_asked.set()
        await cluster.look(4)
        assert not cluster.ends()
        await cluster.look(2)
        assert cluster.ends() and not cluster.asked
        (warning,) = cluster.warnings
        assert warning.startswith("stopping at once: nothing has ended for 4") and CAUSE not in warning

    in_cluster(body)


def test_one_that_stood_still_before_and_works_again_goes_on(in_cluster: Any) -> None:
    async def body(cluster: FakeCluster) -> None:
        await cluster.look(40)
        cluster.run._stop_asked.set()
        await cluster.look(2)
        await cluster.look(60, working_every=3)
        assert not cluster.ends() and not cluster.warnings

    in_cluster(body)


def test_one_that_works_goes_on_to_its_last_checkpoint(in_cluster: Any) -> None:
    async def body(cluster: FakeCluster) -> None:
        await cluster.look(20, working_every=4)
        cluster.run._stop_asked.set()
        await cluster.look(300, working_every=8)
        assert not cluster.ends() and not cluster.warnings

    in_cluster(body)


def test_one_whose_work_items_are_long_gets_three_times_the_longest(in_cluster: Any) -> None:
    async def body(cluster: FakeCluster) -> None:
        await cluster.look(60, working_every=15)
        cluster.run._stop_asked.set()
        await cluster.look(30)
        assert cluster.standstill.idle_s > 40.0 and not cluster.ends()
        await cluster.look(10)
        assert cluster.ends()

    in_cluster(body)


def test_one_with_a_gateway_gives_its_sessions_time_first(in_cluster: Any) -> None:
    async def body(cluster: FakeCluster) -> None:
        cluster.gateway.listen = "0"
        await cluster.look(40)
        cluster.run._stop_asked.set()
        await cluster.look(24)
        assert not cluster.ends(), "its sessions have just ended"
        await cluster.look(2)
        assert cluster.ends()

    in_cluster(body)
