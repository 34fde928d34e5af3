"""Settings of the way that new weights take to the instances."""

from typing import Literal

from ...transport.handle import PathName
from ..config_base import Config


class WeightsConfig(Config):
    """The path of new weights from the trainer to the instances. An instance that the path does not reach is refused
    with the reason, and takes no other."""

    path: Literal["auto", "shm", "cuda_ipc", "tcp"] = "auto"
    """`auto`: the fastest path that reaches each instance; `shm`: memory of the host; `cuda_ipc`: memory of the
    trainer's device, without a copy through the host; `tcp`: the network, once for each node."""

    @property
    def only_path(self) -> PathName | None:
        """None if the instances choose."""
        return None if self.path == "auto" else self.path
