"""The section ``cluster`` of a simulated run: its hosts, their devices, and what connects them."""

from typing import Annotated, Any

from pydantic import field_validator

from ...actors.config_base import Config, Count, Positive, Unit
from ...core.base.texts import guess
from ..hosts.host_description import Gpu, HostDescription
from .devices import PRESETS, DeviceConfig

_CORES = 256  # threads take turns if there are fewer: the time of processors is not modelled


class ClusterConfig(Config):
    """Equal hosts. Bandwidths are of one direction."""

    hosts: Count
    """Number of hosts."""
    devices: Count
    """Devices of each host."""
    device: DeviceConfig
    """Name of a device, or its numbers."""
    network_gb_s: Annotated[Positive, Unit("GB/s")] = 50.0
    """Bandwidth of a host to the others."""
    host_memory_gib: Annotated[Positive, Unit("GiB")] = 2048.0
    """Memory of a host."""
    disk_gb_s: Annotated[Positive, Unit("GB/s")] = 2.0
    """Bandwidth of a host to the disk of checkpoints."""

    @field_validator("device", mode="before")
    @classmethod
    def _by_name(cls, device: Any) -> Any:
        if not isinstance(device, str):
            return device
        if device not in PRESETS:
            raise ValueError(
                f"there is no device {device!r}; there are: {', '.join(PRESETS)}{guess(device, [*PRESETS])}; or give "
                "tflops, memory_gib, memory_gb_s, link_gb_s and host_gb_s of your own"
            )
        return PRESETS[device]

    @property
    def device_bytes(self) -> int:
        """Memory of a device."""
        return int(self.device.memory_gib * 2**30)

    def descriptions(self) -> list[HostDescription]:
        """The hosts as the plan of a run sees them; the first is the head."""
        size = self.device_bytes
        return [
            HostDescription(
                name=f"host-{n}", cores=_CORES, memory_bytes=int(self.host_memory_gib * 2**30),
                gpus=tuple(
                    Gpu(f"GPU-{n}-{index}", index, f"{self.device.memory_gib:g} GiB", size, size)
                    for index in range(self.devices)
                ),
                gpus_note="", shared_memory="", shared_memory_bytes=0, shared_memory_free_bytes=0, python="",
                packages={},
            )
            for n in range(self.hosts)
        ]  # fmt: skip
