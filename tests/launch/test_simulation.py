"""Whole runs of the unchanged actors in virtual time."""

import gc
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from flexmarl.core.collector import spare_collector
from flexmarl.core.wire.faults import Faults
from flexmarl.launch import env
from flexmarl.launch.config_reading import resolve
from flexmarl.launch.run_config import RunConfig
from flexmarl.launch.simulation import Crashes, Simulation, simulate

RECIPE = Path(__file__).parent / "recipes" / "simulated"
DELAYS = Faults(delay_s=(0.0001, 0.002))
# 0.4 s of CPU each.
SEEDS = 140
AT_ONCE = 20


def config(seed: int) -> RunConfig:
    """Some are asynchronous, some train in a shared pool with fewer slots than policies."""
    overrides = [f"seed={seed}"]
    if seed % 4 == 1:
        overrides += ["mode=async", "max_staleness=1"]
    if seed % 4 in (2, 3):
        overrides += ["pool.name=shared", f"pool.slots={seed % 4 - 1}"]
    return resolve(str(RECIPE), overrides)


def digest_of(simulation: Simulation) -> str:
    """The digest of the network's log and the run's files."""
    found = hashlib.sha256("\n".join(simulation.log).encode())
    found.update(repr((simulation.kills, simulation.attempts, simulation.seconds)).encode())
    for path in (simulation.directory.events, simulation.directory.metrics):
        found.update(path.read_bytes())
    return found.hexdigest()


def simulated(seed: int, *, crashes: Crashes | None) -> str:
    """The digest of a simulation, always in a folder of the same name: events name it."""
    folder = Path(env.runtime_base()) / f"flexmarl-simulation-{os.getuid()}-{os.environ['SIMULATION']}"
    folder.mkdir(mode=0o700)
    try:
        return digest_of(simulate(config(seed), folder / "run", seed, faults=DELAYS, crashes=crashes))
    finally:
        subprocess.run(["rm", "-r", str(folder)], check=True)


def check_trained(simulation: Simulation, config: RunConfig) -> None:
    """Each sample of each step is trained once, by the version that it may be trained by."""
    result, steps, training = simulation.result, config.training.steps, config.training
    assert result is not None and result.last_step == steps and not result.stopped
    per_step = training.queries_per_step * training.trajectories_per_query
    for policy in config.policies:
        saved = Path(result.checkpoint) / policy / "simulated_policy.json"
        trained: dict[str, list[str]] = json.loads(saved.read_text())["trained"]
        assert [*trained] == [str(version) for version in range(steps)]
        ids = Counter(sample for samples in trained.values() for sample in samples)
        assert set(ids.values()) == {1}
        for version, samples in trained.items():
            assert Counter(int(sample.partition(":")[0]) for sample in samples) == {
                int(version) + 1: per_step
            }


@pytest.fixture
def collector() -> Iterator[None]:
    """It runs rarely: a simulation makes few cycles, and the search for them takes a quarter of its time."""
    usual = gc.get_threshold()
    spare_collector()
    yield
    gc.unfreeze()
    gc.set_threshold(*usual)


def test_a_run_without_crashes_trains_each_sample_once(tmp_path: Path) -> None:
    made = simulate(config(0), tmp_path / "run", 0, faults=DELAYS)
    check_trained(made, config(0))
    assert made.attempts == 1 and not made.kills and 0.0 < made.seconds < 60.0


@pytest.mark.parametrize("seed", range(4))
def test_a_seed_decides_every_byte_of_the_log_in_any_process(seed: int) -> None:
    """Strings hash differently in each process, and objects lie elsewhere."""
    program = f"from tests.launch.test_simulation import *\nprint(simulated({seed}, crashes=CRASHES))"
    digests = []
    for hashes in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hashes, "SIMULATION": f"{os.getpid()}-{seed}"}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True,
        )  # fmt: skip
        digests.append(done.stdout)
    assert digests[0] == digests[1] != ""


CRASHES = Crashes(every_s=0.5, most=6, fatal_share=0.25)


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_no_crash_loses_or_repeats_a_sample(first: int, collector: None) -> None:
    attempts = killed = 0
    for seed in range(first, first + AT_ONCE):
        with TemporaryDirectory(dir=env.runtime_base()) as folder:
            made = simulate(
                config(seed), Path(folder) / "run", seed, faults=DELAYS, crashes=CRASHES, keep_log=False
            )
            check_trained(made, config(seed))
            attempts, killed = attempts + made.attempts, killed + len(made.kills)
    assert killed > AT_ONCE and attempts > AT_ONCE
