"""Whole runs of the unchanged actors in virtual time."""

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from flexmarl.core.errors import ActorDead, RemoteError
from flexmarl.core.wire.faults import Faults
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.hosts import env
from flexmarl.launch.hosts.nodes import head
from flexmarl.launch.run.actor_launcher import ActorLauncher
from flexmarl.launch.simulate.simulated_faults import FaultKind, FaultPlan
from flexmarl.launch.simulate.simulation import Simulation, simulate

RECIPE = Path(__file__).parents[1] / "recipes" / "simulated"
DELAYS = Faults(delay_s=(0.0001, 0.002), duplicate=0.01, late_s=0.3)
# A silent peer is lost after 0.2 to 0.4 s. Limits that a run of seconds with six faults may reach are high.
OVERRIDES = (
    "supervision.heartbeat_s=0.2", "supervision.missed_heartbeats=2", "supervision.max_restarts=100",
    "rollout.turn_retries=100",
)  # fmt: skip
FAULT_PLAN = FaultPlan(every_s=0.5, most=6, lasts_s=0.5)
HOSTS = 3


def config(seed: int) -> RunConfig:
    """Some are asynchronous, some train in a shared pool with fewer slots than policies."""
    overrides = [f"seed={seed}", *OVERRIDES]
    if seed % 4 == 1:
        overrides += ["mode=async", "max_staleness=1"]
    if seed % 4 in (2, 3):
        overrides += ["pool.name=shared", f"pool.slots={seed % 4 - 1}"]
    return resolve(str(RECIPE), overrides)


def digest_of(simulation: Simulation) -> str:
    """The digest of the network's log and the run's files."""
    found = hashlib.sha256("\n".join(simulation.log).encode())
    found.update(repr((simulation.injected_faults, simulation.attempts, simulation.seconds)).encode())
    for path in (simulation.directory.events, simulation.directory.metrics):
        found.update(path.read_bytes())
    return found.hexdigest()


def simulated(seed: int, *, fault_plan: FaultPlan) -> str:
    """The digest of a simulation, always in a folder of the same name: events name it."""
    folder = Path(env.runtime_base()) / f"flexmarl-simulation-{os.getuid()}-{os.environ['SIMULATION']}"
    folder.mkdir(mode=0o700)
    try:
        made = simulate(
            config(seed), folder / "run", seed,
            hosts=HOSTS, faults=DELAYS, planned_faults=fault_plan.draw(seed),
        )  # fmt: skip
        return digest_of(made)
    finally:
        subprocess.run(["rm", "-r", str(folder)], check=True)


def checked(seed: int, fault_plan: FaultPlan) -> Simulation:
    """A simulation with faults, after all checks."""
    settings = config(seed)
    with TemporaryDirectory(dir=env.runtime_base()) as folder:
        made = simulate(
            settings, Path(folder) / "run", seed,
            hosts=HOSTS, faults=DELAYS, planned_faults=fault_plan.draw(seed), keep_log=False,
        )  # fmt: skip
        check_trained(made, settings)
        check_lives(made)
    return made


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


def check_lives(simulation: Simulation) -> None:
    """Each attempt is a life of the run; the disk may have lost the first event of one that lost its power."""
    names = [json.loads(line)["event"] for line in simulation.directory.events.read_text().splitlines()]
    lives = [name for name in names if name in ("run_started", "run_resumed")]
    assert names[0] == "run_started" and 1 <= len(lives) <= simulation.attempts


def test_a_run_without_troubles_trains_each_sample_once(tmp_path: Path) -> None:
    made = simulate(config(0), tmp_path / "run", 0, hosts=HOSTS, faults=DELAYS)
    check_trained(made, config(0))
    assert made.attempts == 1 and not made.injected_faults and 0.0 < made.seconds < 60.0
    systems = {line.split()[1].partition("#")[0] for line in made.log}
    assert {"host-0/launcher", "host-0/store", "host-1/rollout-0", "host-2/checker-1"} < systems


def test_a_host_that_fails_while_it_joins_is_named_by_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not by the hosts that are missing, or by the memory that the attempt has left."""

    def fail(*_: object, **__: object) -> None:
        raise ValueError("the log is a closed file")

    monkeypatch.setattr(head, "log", SimpleNamespace(info=fail))
    with pytest.raises(RemoteError, match="nodes.join raised ValueError: the log is a closed file"):
        simulate(config(0), tmp_path / "run", 0, hosts=HOSTS)


def test_a_loss_that_comes_again_in_each_attempt_ends_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    async def lose(*_: object) -> None:
        attempts.append(1)
        raise ActorDead("store", "it ends at each start")

    monkeypatch.setattr(ActorLauncher, "begin", lose)
    with pytest.raises(ActorDead, match="it ends at each start"):
        simulate(config(0), tmp_path / "run", 0, hosts=HOSTS)
    assert 2 < len(attempts) < 100


def test_a_seed_decides_every_byte_of_the_log_in_any_process() -> None:
    """Strings hash differently in each process, and objects lie elsewhere."""
    program = (
        "from tests.launch.simulate.test_simulation import *\n"
        "print(*(simulated(seed, fault_plan=FAULT_PLAN) for seed in range(2)))"
    )
    digests = []
    for hashes in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hashes, "SIMULATION": str(os.getpid())}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True,
        )  # fmt: skip
        digests.append(done.stdout.split())
    assert digests[0] == digests[1] and len({*digests[0]}) == 2


@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind is not FaultKind.FATAL_KILL])
def test_a_run_survives_each_kind_of_fault_alone(kind: FaultKind) -> None:
    """Those that do not end included, for which a host is left out of the next attempt. One run is asynchronous, and
    one shares a slot."""
    drawn = []
    for seed in (1, 2):
        made = checked(seed, replace(FAULT_PLAN, for_good=0.3, kinds={kind: 1.0}))
        drawn += made.injected_faults
    assert len(drawn) >= 4 and {fault.kind for fault in drawn} == {kind}
