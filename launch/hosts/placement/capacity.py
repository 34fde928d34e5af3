"""The capacity that is left on a host while actors are placed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ..host_description import Gpu, HostDescription
from .plan import Need, Placed, Purpose

UNKNOWN_BYTES: Final = 1 << 60
"""The memory of a host that is made up: more than any need."""

_PART: Final = "MIG-"
"""The beginning of the UUID of a part of a GPU. A process sees one part at most (CUDA's guide to MIG)."""


@dataclass(slots=True)
class GpuCapacity:
    """``holds``: the purposes of its actors. ``usable``: false if others use it and the config does not allow that."""

    number: int
    usable: bool
    is_part: bool
    left_bytes: int
    holds: list[Purpose] = field(default_factory=list)


@dataclass(slots=True)
class HostCapacity:
    """``free``: by purpose, the GPUs that an actor of it may have."""

    name: str
    cores: int
    cores_used: int
    memory_left: int
    gpus: list[GpuCapacity]
    free: dict[Purpose, int]
    sharing: bool

    def choose(self, needs: Sequence[Need]) -> list[Placed] | None:
        """Places for all of ``needs`` on this host, GPUs without an actor first; None if they don't fit."""
        if sum(need.memory_bytes for need in needs) > self.memory_left:
            return None
        reserved_gpus: set[int] = set()
        placed = []
        for need in needs:
            if (gpus := self._gpus_for(need, reserved_gpus)) is None:
                return None
            reserved_gpus.update(gpus)
            placed.append(Placed(self.name, need, gpus))
        return placed

    def _gpus_for(self, need: Need, reserved_gpus: set[int]) -> tuple[int, ...] | None:
        if need.named:
            return need.named if all(self._has_room(self._at(n), need) for n in need.named) else None
        if not need.gpus:
            return ()
        if self.free[need.purpose] < need.gpus:
            return None
        fit = [
            gpu
            for gpu in self.gpus
            if gpu.number not in reserved_gpus
            and self._is_free(gpu, need.purpose)
            and self._has_room(gpu, need)
            if need.gpus == 1 or not gpu.is_part
        ]
        if len(fit) < need.gpus:
            return None
        fit.sort(key=lambda gpu: (len(gpu.holds), gpu.left_bytes, gpu.number))
        return tuple(sorted(gpu.number for gpu in fit[: need.gpus]))

    def take(self, placed: Placed) -> None:
        """Takes the room of one actor that ``choose`` has placed. It is not checked again."""
        self._change(placed, 1)
        for number in placed.gpus:
            gpu = self.gpus[number]
            self._count(gpu, -1)
            gpu.holds.append(placed.need.purpose)
            self._count(gpu, 1)

    def give_back(self, placed: Placed) -> None:
        """Undoes ``take`` of the same placement, for a search that tries another one."""
        self._change(placed, -1)
        for number in placed.gpus:
            gpu = self.gpus[number]
            self._count(gpu, -1)
            gpu.holds.remove(placed.need.purpose)
            self._count(gpu, 1)

    @property
    def training(self) -> int:
        """The number of GPUs with an actor that trains."""
        return sum("training" in gpu.holds for gpu in self.gpus)

    def used_share(self, purpose: Purpose) -> float:
        """The share of the host's GPUs that are not free for ``purpose``."""
        return 1 - self.free[purpose] / len(self.gpus) if self.gpus else 1.0

    def state(self) -> tuple[object, ...]:
        """Equal for hosts between which there is no difference."""
        gpus = sorted((gpu.usable, gpu.is_part, gpu.left_bytes, tuple(gpu.holds)) for gpu in self.gpus)
        return self.memory_left, self.cores, self.cores_used, tuple(gpus)

    def _change(self, placed: Placed, sign: int) -> None:
        self.cores_used += sign * placed.need.cores
        self.memory_left -= sign * placed.need.memory_bytes
        for number in placed.gpus:
            self.gpus[number].left_bytes -= sign * placed.need.gpu_bytes

    def _count(self, gpu: GpuCapacity, sign: int) -> None:
        for purpose in self.free:
            self.free[purpose] += sign * self._is_free(gpu, purpose)

    def _is_free(self, gpu: GpuCapacity, purpose: Purpose) -> bool:
        return gpu.usable and (purpose not in gpu.holds if self.sharing else not gpu.holds)

    def _at(self, number: int) -> GpuCapacity | None:
        return self.gpus[number] if number < len(self.gpus) else None

    @staticmethod
    def _has_room(gpu: GpuCapacity | None, need: Need) -> bool:
        return gpu is not None and gpu.usable and need.gpu_bytes <= gpu.left_bytes


def capacity_of(host: HostDescription, *, share_gpus: bool, sharing: bool) -> HostCapacity:
    """``share_gpus``: GPUs that others use may be used. ``sharing``: one actor that trains and one that generates may
    be on the same GPU."""
    gpus = [
        GpuCapacity(number, is_usable(gpu, share_gpus), is_part(gpu), usable_bytes(gpu))
        for number, gpu in enumerate(host.gpus)
    ]
    usable = sum(gpu.usable for gpu in gpus)
    free: dict[Purpose, int] = {"training": usable, "generation": usable}
    return HostCapacity(host.name, host.cores, 0, host.memory_bytes, gpus, free, sharing)


def is_usable(gpu: Gpu, share_gpus: bool) -> bool:
    """True if no other program uses the GPU, or the config allows that (``hosts.share_gpus``)."""
    return share_gpus or not gpu.users


def is_part(gpu: Gpu) -> bool:
    """True for a part of a GPU (MIG)."""
    return gpu.uuid.startswith(_PART)


def usable_bytes(gpu: Gpu) -> int:
    """Bytes of the GPU that a run may use: on one that others use, those that are free now."""
    return gpu.free_bytes if gpu.users else gpu.total_bytes
