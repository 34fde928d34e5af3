"""Reports of several processes, of which some do not answer."""

import asyncio
from typing import Any, cast

from flexmarl.core.errors import ActorDead, CallTimeout
from flexmarl.core.supervision.system_api import ask_processes
from flexmarl.core.testing import virtual_time


class Process:
    """Stands for the reference to a process, and for its API. ``answer``: None, it never answers."""

    def __init__(self, answer: object, after_s: float = 0.0) -> None:
        self.answer, self.after_s = answer, after_s
        self.timeout_s = 0.0

    def within(self, timeout_s: float) -> "Process":
        self.timeout_s = timeout_s
        return self

    async def asked(self) -> object:
        if self.answer is None:
            await asyncio.sleep(self.timeout_s)
            raise CallTimeout("process", "asked", self.timeout_s)
        await asyncio.sleep(self.after_s)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_all_are_asked_at_once_and_those_that_answer_are_reported_as_they_come() -> None:
    processes: dict[str, Any] = {
        "slow": Process("s", 2.0),
        "silent": Process(None),
        "dead": Process(ActorDead("dead", "it ended")),
        "fast": Process("f", 1.0),
    }
    times: dict[str, float] = {}

    async def main() -> dict[str, object]:
        loop = asyncio.get_running_loop()
        began = loop.time()

        def reported(name: str, report: object) -> None:
            assert report == processes[name].answer
            times[name] = loop.time() - began

        ask: Any = lambda _, process: cast(Process, process).asked()  # noqa: E731
        reports = await ask_processes(processes, ask, 3.0, reported)
        times["all"] = loop.time() - began
        return reports

    assert [*virtual_time.run(main()).items()] == [("slow", "s"), ("fast", "f")], (
        "in the order of the processes"
    )
    assert times == {"fast": 1.0, "slow": 2.0, "all": 3.0}, "the silent one delays no report"
