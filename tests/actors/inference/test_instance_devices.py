"""Instances on simulated devices: new weights from the memory of the trainer's device, and a trainer that is killed."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pydantic import TypeAdapter

from flexmarl.actors.errors import LoadFailed
from flexmarl.actors.inference.engines.embedded import embedded_factory as embedded
from flexmarl.actors.inference.inference_config import EmbeddedEngineConfig
from flexmarl.actors.inference.instance import Instance
from flexmarl.actors.inference.instance_setup import InstanceSetup, ServedPolicy
from flexmarl.actors.messages import Generation, Loaded, ModelConfig, Published, WeightsConfig
from flexmarl.actors.names import PolicyName, Version
from flexmarl.actors.pretrained import empty_model
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.transport import StateHandle
from flexmarl.transport.device_memory import device_memory
from flexmarl.transport.state import StateTransport

from ...fake_device_actors import DEVICE, TOTAL, on_device
from ...fake_devices import FakeDevices
from ...patience import PATIENCE_S
from . import weight_sender
from .test_instance import SOLVER, model, turn
from .weight_sender import draw

__all__ = ["model"]  # a fixture

OTHER = "GPU-other"
SMALL = 8192  # bytes of a buffer


class Killing(FakeDevices):
    """Kills a process when the copy of a buffer begins."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, {DEVICE: TOTAL})
        self.copies_left = -1
        self.process: asyncio.subprocess.Process | None = None

    def copy(self, device: str, targets: Any, sources: Any, after: Any = None) -> Any:
        if self.process is not None and self.copies_left == 0:
            self.process.kill()
            self.process = None
        self.copies_left -= 1
        return super().copy(device, targets, sources, after)


@pytest.fixture
def devices(private: Path) -> Killing:
    return Killing(private)


@pytest.fixture
def weights(model: ModelConfig) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in empty_model(model).state_dict().items()}


async def instance_on(
    devices: FakeDevices | None,
    system: ActorSystem,
    monkeypatch: pytest.MonkeyPatch,
    private: Path,
    model: ModelConfig,
    path: Literal["auto", "cuda_ipc"] = "auto",
) -> ActorRef[Instance]:
    """``devices``: those of the instance; None: it is on the CPU."""
    monkeypatch.setattr(f"{Instance.__module__}.find_devices", lambda names: devices)
    if devices is not None:
        monkeypatch.setattr(embedded, "empty_model", lambda model: on_device(empty_model(model), devices))
    served = {SOLVER: ServedPolicy(model, EmbeddedEngineConfig(max_batch=4))}
    actor = Instance(InstanceSetup(SOLVER, served, weights=WeightsConfig(path=path)))
    return await system.add(actor, "solver-0")


async def load(
    instance: ActorRef[Instance], transport: StateTransport, weights: dict[str, torch.Tensor], version: int
) -> Loaded:
    draw(weights, version)
    handle = await transport.set("solver", weights, version=version)
    return await instance.api.load(Published(SOLVER, Version(version), handle))


async def test_weights_go_from_device_to_device(
    devices: Killing, system: ActorSystem, monkeypatch: pytest.MonkeyPatch, private: Path, model: ModelConfig,
    weights: dict[str, torch.Tensor],
) -> None:  # fmt: skip
    on_the_device = await instance_on(devices, system, monkeypatch, private, model)
    async with StateTransport(private, FakeDevices(private, {DEVICE: TOTAL})) as trainer:
        answers = []
        for version in range(3):
            loaded = await load(on_the_device, trainer, weights, version)
            assert loaded.chosen is not None and loaded.chosen.path == "cuda_ipc"
            assert DEVICE in loaded.chosen.reason and loaded.chosen.refused == {}
            answers.append(await on_the_device.api.generate(turn(version)))
        await system.remove("solver-0")
        on_the_host = await instance_on(None, system, monkeypatch, private, model)
        monkeypatch.setattr(embedded, "empty_model", empty_model)
        loaded = await load(on_the_host, trainer, weights, 2)
        assert loaded.chosen is not None and loaded.chosen.path == "shm"
        assert (
            (await on_the_host.api.generate(turn(2))).logprobs == answers[2].logprobs != answers[1].logprobs
        )


async def test_a_path_that_does_not_reach_is_refused_by_name_and_another_is_seen(
    system: ActorSystem, monkeypatch: pytest.MonkeyPatch, private: Path, model: ModelConfig,
    weights: dict[str, torch.Tensor],
) -> None:  # fmt: skip
    other = FakeDevices(
        private, {DEVICE: TOTAL, OTHER: TOTAL}, visible=[OTHER], unreachable=[(OTHER, DEVICE)]
    )
    instance = await instance_on(other, system, monkeypatch, private, model, "cuda_ipc")
    async with StateTransport(private, FakeDevices(private, {DEVICE: TOTAL}), "cuda_ipc") as trainer:
        with pytest.raises(LoadFailed, match=r"NoPath.*can't be opened here: .*peer access"):
            await load(instance, trainer, weights, 0)
        assert await instance.api.served_version(SOLVER) is None
    await system.remove("solver-0")
    instance = await instance_on(other, system, monkeypatch, private, model)
    async with StateTransport(private, FakeDevices(private, {DEVICE: TOTAL})) as trainer:
        loaded = await load(instance, trainer, weights, 1)
        assert loaded.chosen is not None and loaded.chosen.path == "shm"
        assert "peer access is not supported" in loaded.chosen.refused["cuda_ipc"]


# ----------------------------------------------------------------------- kill -9


@asynccontextmanager
async def sender(
    private: Path, file: Path, weights: dict[str, torch.Tensor], dies_at: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A trainer's process. ``dies_at``: the buffer of version 2 at which it is killed; -1: it is not."""
    torch.save(weights, file)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", weight_sender.__name__,
        str(private), str(dies_at), str(file), str(SMALL), DEVICE, str(TOTAL),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24,
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def published(process: asyncio.subprocess.Process) -> Published:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        handle = TypeAdapter(StateHandle).validate_json(await process.stdout.readline())
    return Published(PolicyName("solver"), Version(handle.version), handle)


async def answer(instance: ActorRef[Instance], version: int) -> Generation:
    return await instance.api.generate(turn(version))


@pytest.mark.parametrize("buffer", [0, 2, 4])
async def test_a_trainer_killed_at_a_buffer_leaves_the_instance_on_a_whole_version(
    devices: Killing, system: ActorSystem, monkeypatch: pytest.MonkeyPatch, private: Path, tmp_path: Path,
    model: ModelConfig, weights: dict[str, torch.Tensor], buffer: int,
) -> None:  # fmt: skip
    instance = await instance_on(devices, system, monkeypatch, private, model)
    async with sender(private, tmp_path / "weights", weights, buffer) as process:
        first = await published(process)
        assert len(first.handle.sources[0].buffers) > 4  # type: ignore[union-attr]
        await instance.api.load(first)
        before = await answer(instance, 1)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == -signal.SIGKILL
    assert await answer(instance, 1) == before
    async with StateTransport(private, FakeDevices(private, {DEVICE: TOTAL})) as trainer:
        await load(instance, trainer, weights, 3)
        assert (await answer(instance, 3)).logprobs != before.logprobs
        await load(instance, trainer, weights, 1)
        assert await answer(instance, 1) == before, "version 1 was whole"


@pytest.mark.parametrize("buffer", [0, 2, 4])
async def test_a_trainer_killed_while_an_instance_reads_leaves_a_whole_version_or_none(
    devices: Killing, system: ActorSystem, monkeypatch: pytest.MonkeyPatch, private: Path, tmp_path: Path,
    model: ModelConfig, weights: dict[str, torch.Tensor], buffer: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(device_memory, "BUFFER_BYTES", SMALL)
    instance = await instance_on(devices, system, monkeypatch, private, model)
    async with sender(private, tmp_path / "weights", weights, -1) as process:
        await instance.api.load(await published(process))
        assert process.stdin is not None
        process.stdin.write(b"\n")
        second = await published(process)
        devices.copies_left, devices.process = buffer, process
        try:
            await instance.api.load(second)
            killed = await answer(instance, 2)
        except LoadFailed:
            killed = None
            assert await instance.api.served_version(SOLVER) is None
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == -signal.SIGKILL
    async with StateTransport(private, FakeDevices(private, {DEVICE: TOTAL})) as trainer:
        await load(instance, trainer, weights, 2)
        assert killed is None or await answer(instance, 2) == killed, "it was whole"
