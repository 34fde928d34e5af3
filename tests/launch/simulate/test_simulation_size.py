"""A run on many hosts, in one process."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

from flexmarl.core.wire.faults import Faults
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.simulate.simulation import place_simulated, simulate

RECIPE = Path(__file__).parents[1] / "recipes" / "simulated"
DELAYS = Faults(delay_s=(0.0001, 0.002))


def config(instances: int) -> RunConfig:
    each = [f"agents.{agent}.instances={instances // 2}" for agent in ("solver", "checker")]
    return resolve(str(RECIPE), [*each, "rollout.workers=8", "training.steps=1"])


def calls_of_a_run(folder: Path, hosts: int, instances: int) -> int:
    """The calls of Python functions in a run of one step, from its start to its end: the same each time."""
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        made = simulate(config(instances), folder, 1, hosts=hosts, faults=DELAYS, keep_log=False)
    finally:
        sys.setprofile(None)
    assert made.result is not None and made.result.last_step == 1 and made.attempts == 1
    return calls


def test_512_instances_on_64_hosts_take_four_times_the_work_of_128_on_16(tmp_path: Path) -> None:
    """All are up after 1 s of CPU time, and the step is trained after 3 s. A part of the work does not grow: 3.5 times
    is usual, and anything that grows with the square is seen."""
    simulate(config(4), tmp_path / "imports", 1, hosts=2)
    few = calls_of_a_run(tmp_path / "few", 16, 128)
    assert calls_of_a_run(tmp_path / "many", 64, 512) < 3.8 * few


def test_512_instances_are_spread_evenly_over_64_hosts() -> None:
    plan = place_simulated(config(512), [f"host-{n}" for n in range(64)])
    load = Counter(placed.node for placed in plan.actors.values())
    assert set(load.values()) == {8, 9} and load.total() == 524
