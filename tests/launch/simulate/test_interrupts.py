"""Ctrl-C in a simulation."""

import asyncio
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexmarl.actors.inference.engines.simulated_step_engine import SimulatedStepEngine
from flexmarl.core.testing import virtual_time
from flexmarl.launch.simulate.interrupts import interruptible
from flexmarl.launch.simulate.scenario import read_scenario
from flexmarl.launch.simulate.scenario_run import run_scenario

SCENARIO = Path(__file__).parent / "scenario.yaml"


@pytest.fixture(autouse=True)
def _handler_of_python() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_the_first_ctrl_c_lets_the_run_end_what_it_has_started() -> None:
    async def main() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            seen.append("not where it came")
            await asyncio.sleep(1)
        finally:
            await asyncio.sleep(3)
            seen.append(f"ended after {asyncio.get_running_loop().time():g} s")

    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        virtual_time.run(interruptible(main()))
    assert seen == ["not where it came", "ended after 3 s"]


def test_the_second_ctrl_c_does_not_wait() -> None:
    async def main() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(1)
        finally:
            signal.raise_signal(signal.SIGINT)
            seen.append("waited")

    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        virtual_time.run(interruptible(main()))
    assert not seen


def test_a_cancellation_of_another_origin_stays_one() -> None:
    async def main() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        virtual_time.run(interruptible(main()))


def test_a_handler_of_the_program_stays() -> None:
    async def main() -> object:
        return signal.getsignal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert virtual_time.run(interruptible(main())) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_amid_the_steps_of_a_scenario_comes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = SimulatedStepEngine.step, itertools.count()

    def step_and_interrupt(engine: SimulatedStepEngine) -> object:
        if next(steps) == 5:
            signal.raise_signal(signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(SimulatedStepEngine, "step", step_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_scenario(read_scenario(SCENARIO, ()), tmp_path / "run")
    assert next(steps) >= 6
