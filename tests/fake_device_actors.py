"""Actors whose devices are simulated: the trainer's weights and the instances' models lie in the memory of a
``FakeDevices``, so that a whole run takes the paths of devices without a GPU. Spawned by class path.
"""

from typing import Any

from torch import nn

from flexmarl.actors.inference import instance
from flexmarl.actors.inference.engines.embedded import embedded_factory as embedded
from flexmarl.actors.pretrained import empty_model
from flexmarl.actors.trainer import trainer
from flexmarl.actors.trainer.pool import slot

from .fake_devices import FakeDevices

DEVICE = "GPU-simulated"
TOTAL = 1 << 26


def on_device(model: Any, devices: FakeDevices) -> Any:
    """The model, its parameters moved to the first device."""
    module: nn.Module = model
    for parameter in module.parameters():
        memory = devices.allocate(devices.visible()[0], parameter.nbytes).tensor
        placed = memory.view(parameter.dtype).view(parameter.shape)
        parameter.data = placed.copy_(parameter.data)
    return model


class Trainer(trainer.Trainer):
    async def on_start(self) -> None:
        devices = FakeDevices(self.system.directory, {DEVICE: TOTAL})
        assert "find_devices" in vars(slot)
        vars(slot)["find_devices"] = lambda names: devices
        await super().on_start()


class Instance(instance.Instance):
    async def on_start(self) -> None:
        devices = FakeDevices(self.system.directory, {DEVICE: TOTAL})
        assert "find_devices" in vars(instance) and "empty_model" in vars(embedded)
        vars(instance)["find_devices"] = lambda names: devices
        vars(embedded)["empty_model"] = lambda model: on_device(empty_model(model), devices)
        await super().on_start()
