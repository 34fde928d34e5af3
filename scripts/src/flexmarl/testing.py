"""Tests of your own actors: virtual time, a network in memory with faults, an engine without a model.

    from flexmarl.core import ActorSystem
    from flexmarl.testing import Faults, MemoryNetwork, run

    async def hours_of_timeouts() -> None:
        network = MemoryNetwork(seed=1)
        network.faults = Faults(drop=0.01)
        async with (
            ActorSystem("a", wire=network.wire("a")) as one,
            ActorSystem("b", wire=network.wire("b")) as two,
        ):
            ...

    run(hours_of_timeouts())  # takes milliseconds, and the same way each time

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from .core.base.front_door import lazy_exports

if TYPE_CHECKING:
    from .actors.inference.engines.simulated_engine import SimulatedEngine
    from .actors.inference.inference_config import SimulatedEngineConfig
    from .core.errors import Deadlock, NotInVirtualTime, VirtualTimeExceeded
    from .core.testing.memory_node import MemoryNode
    from .core.testing.virtual_time import VirtualTimeLoop, run
    from .core.wire.faults import Faults
    from .core.wire.memory import MemoryNetwork
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "actors.inference.engines.simulated_engine": ["SimulatedEngine"],
            "actors.inference.inference_config": ["SimulatedEngineConfig"],
            "core.errors": ["Deadlock", "NotInVirtualTime", "VirtualTimeExceeded"],
            "core.testing.memory_node": ["MemoryNode"],
            "core.testing.virtual_time": ["VirtualTimeLoop", "run"],
            "core.wire.faults": ["Faults"],
            "core.wire.memory": ["MemoryNetwork"],
        },
    )

__all__ = [
    "Deadlock",
    "Faults",
    "MemoryNetwork",
    "MemoryNode",
    "NotInVirtualTime",
    "SimulatedEngine",
    "SimulatedEngineConfig",
    "VirtualTimeExceeded",
    "VirtualTimeLoop",
    "run",
]
