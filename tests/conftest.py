"""Fixtures that several folders of tests use."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog

from flexmarl.core.base.collector import spare_collector
from flexmarl.core.delivery import connection
from flexmarl.core.durable.private_directory import private_directory
from flexmarl.core.supervision.process_node import ProcessNode
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem
from flexmarl.launch.hosts import env

from .cpu_seconds import CpuSecondsPlugin
from .deadline import DeadlinePlugin
from .independent_tests import IndependentTestsPlugin
from .left_out import LeftOutPlugin
from .leftovers import LeftoversPlugin
from .machine import MachinePlugin
from .patience import PATIENCE_S
from .second_pass import SecondPassPlugin
from .vllm_plugin import VllmPlugin
from .warm_process import TEMPLATE

TESTS = Path(__file__).parent

# Processes of actors find the tests' classes as this process's other modules: they import nothing from the directory in
# which they start.
if str(TESTS.parent) not in sys.path:
    sys.path.append(str(TESTS.parent))

# A busy machine may take any time for an example. Each session draws other examples: half of the usual number finds as
# much in twice the sessions.
hypothesis.settings.register_profile(
    "flexmarl",
    deadline=None,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("flexmarl")

# nohup and shells that start the tests in the background have these ignored, also in all processes that tests start.
for _number, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)


# The tests are collected without it: modules and items stay. The first module's fixture starts it again.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    leftovers = LeftoversPlugin(config)
    config.pluginmanager.register(leftovers)
    config.pluginmanager.register(MachinePlugin(config, leftovers))
    config.pluginmanager.register(LeftOutPlugin())
    cpu_seconds = CpuSecondsPlugin(config)
    config.pluginmanager.register(cpu_seconds)
    config.pluginmanager.register(SecondPassPlugin(cpu_seconds))
    config.pluginmanager.register(DeadlinePlugin())
    config.pluginmanager.register(VllmPlugin())
    config.pluginmanager.register(IndependentTestsPlugin())


def pytest_unconfigure() -> None:
    TEMPLATE.close()


@pytest.fixture(autouse=True, scope="module")
def spared_collector() -> None:
    """Lets the collector skip what earlier modules have left: a million objects, which stay until the end."""
    spare_collector()
    gc.enable()


@pytest.fixture
def patient_for_exit_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls to a process that has ended wait for its exit reason however busy the one that reports it is."""
    monkeypatch.setattr(connection, "EXIT_REASON_WAIT_S", PATIENCE_S)


@pytest.fixture(autouse=True, scope="module")
def same_log() -> Iterator[None]:
    """The log of the next module is not the closed stream of a command that ran in this process."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(autouse=True)
def silent_logs() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


@pytest.fixture
async def private() -> AsyncIterator[Path]:
    """A run's private directory. A test that leaves files in it fails."""
    async with private_directory(env.runtime_base()) as directory:
        yield directory
    assert not directory.exists()


@pytest.fixture
async def system(private: Path) -> AsyncIterator[ActorSystem]:
    async with ActorSystem("tests", private) as system:
        yield system
    assert len(asyncio.all_tasks()) == 1, "a task outlived its system"


@pytest.fixture
async def supervisor(system: ActorSystem, private: Path, tmp_path: Path) -> AsyncIterator[Supervisor]:
    """A supervisor that can also spawn actors of the test modules."""
    path = os.pathsep.join([str(TESTS.parent / "scripts" / "src"), str(TESTS / "core")])
    environment = {**env.actor_environment(), "PYTHONPATH": path}
    async with Supervisor(system, ProcessNode(system, private, tmp_path, environment)) as supervisor:
        yield supervisor
