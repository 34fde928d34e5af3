"""The section ``cluster`` of a simulated run: its hosts, their devices, and what connects them."""

from typing import Annotated, Any, Final, Literal

from pydantic import field_validator, model_validator

from ...actors.config_base import Config, Count, NonNegative, Positive, Unit
from ...core.base.texts import guess
from ..hosts.host_description import Gpu, HostDescription
from .devices import PRESETS, DeviceConfig

EngineSource = Literal["roofline", "measured"]

_MOST_DEVICES: Final = 65_536  # the plan has an object for each: a mistyped number would fill the memory
_CORES = 256  # threads take turns if there are fewer: the time of processors is not modelled


def _find_preset(device: str) -> DeviceConfig:
    """Raises ValueError for a name that no device has."""
    if device not in PRESETS:
        raise ValueError(
            f"there is no device {device!r}; there are: {', '.join(PRESETS)}{guess(device, [*PRESETS])}; or give "
            "tflops, memory_gib, memory_gb_s, link_gb_s and host_gb_s of your own, or base and those that differ"
        )
    return PRESETS[device]


class ClusterConfig(Config):
    """Equal hosts. Bandwidths are of one direction."""

    hosts: Count
    """Number of hosts."""
    devices: Count
    """Devices of each host."""
    device: DeviceConfig
    """Name of a device, its numbers, or the name of a device as `base` and the numbers in which it differs."""
    network_gb_s: Annotated[Positive, Unit("GB/s")] = 50.0
    """Bandwidth of a host to the others."""
    switch_gb_s: Annotated[Positive, Unit("GB/s")] | None = None
    """Bandwidth of all transfers between hosts together. `null`: the switch never is the narrowest."""
    network_latency_s: Annotated[NonNegative, Unit("s")] = 20e-6
    """Time of the last byte from a host to another. A round trip between sockets takes some 50 us in one rack."""
    engine_times: EngineSource = "roofline"
    """Source of the engines' times: `roofline`: works by the device's numbers; `measured`: tables of
    `aiconfigurator-core`, the extra `plan`."""
    host_memory_gib: Annotated[Positive, Unit("GiB")] = 2048.0
    """Memory of a host."""
    copies_gb_s: Annotated[Positive, Unit("GB/s")] | None = None
    """Bandwidth that the devices of a host achieve together to its memory. `null`: each that of its own link."""
    disk_gb_s: Annotated[Positive, Unit("GB/s")] = 2.0
    """Bandwidth of a host to the disk of checkpoints."""

    @field_validator("device", mode="before")
    @classmethod
    def _by_name(cls, device: Any) -> Any:
        if isinstance(device, str):
            return _find_preset(device)
        if not isinstance(device, dict) or "base" not in device:
            return device
        if not isinstance(base := device["base"], str):
            raise ValueError(f"base is {base!r}, not the name of a device; there are: {', '.join(PRESETS)}")
        return {
            **_find_preset(base).model_dump(),
            **{key: value for key, value in device.items() if key != "base"},
        }

    @model_validator(mode="after")
    def _devices_can_be_planned(self) -> "ClusterConfig":
        if (devices := self.hosts * self.devices) > _MOST_DEVICES:
            raise ValueError(
                f"hosts={self.hosts} x devices={self.devices} are {devices} devices, and at most {_MOST_DEVICES} can "
                "be simulated: take fewer"
            )
        return self

    @property
    def device_bytes(self) -> int:
        """Memory of a device."""
        return int(self.device.memory_gib * 2**30)

    def copy_bytes_s(self, devices: int) -> float:
        """Bytes that each of ``devices`` of a host copies to its memory in a second, or back, all at the same time."""
        alone = self.device.host_gb_s * self.device.link_share
        return 1e9 * (alone if self.copies_gb_s is None else min(alone, self.copies_gb_s / devices))

    def descriptions(self, more: int = 0) -> list[HostDescription]:
        """The hosts as the plan of a run sees them, and ``more`` that are alike; the first is the head."""
        size, memory_bytes = self.device_bytes, int(self.host_memory_gib * 2**30)
        return [
            HostDescription(
                name=f"host-{n}", cores=_CORES, memory_bytes=memory_bytes,
                gpus=tuple(
                    Gpu(f"GPU-{n}-{index}", index, f"{self.device.memory_gib:g} GiB", size, size)
                    for index in range(self.devices)
                ),
                gpus_note="", shared_memory="cluster.host_memory_gib", shared_memory_bytes=memory_bytes,
                shared_memory_free_bytes=memory_bytes, python="", packages={},
            )
            for n in range(self.hosts + more)
        ]  # fmt: skip
