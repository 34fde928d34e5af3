"""Settings of the way that new weights take to the instances, and of the proof that they are there."""

from typing import Annotated, Literal

from ...transport.handle import PathName
from ..config_base import Config, Natural, Positive, Unit


class WeightsConfig(Config):
    """The path of new weights from the trainer to the instances. An instance that the path does not reach is refused
    with the reason, and takes no other."""

    path: Literal["auto", "shm", "cuda_ipc", "tcp"] = "auto"
    """`auto`: the fastest path that reaches each instance; `shm`: memory of the host; `cuda_ipc`: memory of the
    trainer's device, without a copy through the host; `tcp`: the network, once for each node."""

    probe_every: Annotated[Natural, Unit("versions")] = 8
    """Every so many versions an instance [proves](training-pool.md#proof-of-the-weights) that its engine computes with
    the new weights, before it gets turns: version 0, and each one that this number divides. 0: never."""
    probe_bound: Annotated[Positive, Unit("nats")] | None = None
    """Most difference of a probe's log-probability from the trainer's. `null`: 0.01 in float32, 0.3 in bfloat16, none
    for an engine that quantises the weights."""

    @property
    def only_path(self) -> PathName | None:
        """None if the instances choose."""
        return None if self.path == "auto" else self.path
