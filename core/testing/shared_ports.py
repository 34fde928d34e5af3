"""Ports that transfers share: rates, the next end, and the ends that are due. Pure: times come in, decisions go out.

A transfer crosses several ports at once, as a copy from a device over its host's network to another host does. It is
as fast as the narrowest lets it. Ports are shared max-min fairly: no transfer can be faster unless a slower one, or one
as slow, becomes slower. Rates are found by progressive filling (Bertsekas and Gallager: Data Networks, 1992, section
6.5.2): all rise alike; where a port is full, the transfers that cross it stay as they are.

    ports = SharedPorts({"host-0 out": 50e9, "host-1 in": 50e9})
    ports.begin("weights", 28e9, {"host-0 out": 1.0, "host-1 in": 1.0}, now_s=0.0)
    ports.due_s                  # 0.56
    ports.ended(0.56)            # ["weights"]

Times are seconds, sizes bytes. Between two changes all rates are constant, so that nothing is computed but at changes.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_ROUNDING_S: Final = 1e-8
"""A transfer with less than this to go has ended: times are rounded, and transfers that are alike end at once."""


@dataclass(slots=True)
class _Transfer:
    left_bytes: float
    uses: Mapping[str, float]
    latency_s: float
    rate: float = 0.0


@dataclass(slots=True)
class _Load:
    """A port while rates are found. ``users``: the transfers whose rates still rise, in the order of their begins, with
    the bytes of each byte that cross the port. ``weight``: the sum of these bytes."""

    free: float
    users: dict[int, float] = field(default_factory=dict)
    weight: float = 0.0


class SharedPorts(Generic[T]):
    """``bytes_s``: the bandwidth of each port. Transfers have names, no two of which are under way at once."""

    def __init__(self, bytes_s: Mapping[str, float]) -> None:
        """Raises ValueError for a bandwidth that is not above 0."""
        for port, bandwidth in bytes_s.items():
            if not bandwidth > 0:
                raise ValueError(f"port {port} has a bandwidth of {bandwidth!r} bytes/s: it must be above 0")
        self.carried_bytes = dict.fromkeys(bytes_s, 0.0)
        """Bytes that have crossed each port."""
        self._bytes_s = dict(bytes_s)
        self._now_s = -math.inf
        self._moving: dict[T, _Transfer] = {}
        self._arriving: dict[T, float] = {}
        """Transfers whose last byte is on its way, with the time at which it arrives."""
        self._is_stale = False
        """Rates are those before the last begin or end: all changes of one moment are one."""

    def begin(
        self, name: T, size_bytes: float, uses: Mapping[str, float], now_s: float, latency_s: float = 0.0
    ) -> None:
        """``uses``: the ports, with the part of the bytes that crosses each; without any it takes its latency alone.
        Raises KeyError for a port that is unknown, ValueError for a name that is under way, for a negative size or
        latency, and for a part that is not above 0."""
        if name in self._moving or name in self._arriving:
            raise ValueError(f"transfer {name!r} is under way")
        if not size_bytes >= 0 or not latency_s >= 0:
            raise ValueError(
                f"transfer {name!r}: {size_bytes!r} bytes and {latency_s!r} s must not be negative"
            )
        for port, part in uses.items():
            if not part > 0:
                raise ValueError(f"transfer {name!r}: {part!r} of it crosses port {port}: it must be above 0")
            self._bytes_s[port]  # raises KeyError
        self._advance(now_s)
        if size_bytes and uses:
            self._moving[name] = _Transfer(size_bytes, uses, latency_s)
            self._is_stale = True
        else:
            self._arriving[name] = now_s + latency_s

    def stop(self, name: T, now_s: float) -> None:
        """Ends a transfer before its time; nothing if it has ended."""
        self._advance(now_s)
        self._arriving.pop(name, None)
        if self._moving.pop(name, None) is not None:
            self._is_stale = True

    def ended(self, now_s: float) -> list[T]:
        """The transfers that have arrived since the last call, in the order of their ends. To be called at ``due_s`` at
        the latest: rates change there."""
        self._advance(now_s)
        self._find_rates()
        # A sum with a large time is rounded by more.
        rounding_s = max(_ROUNDING_S, 4 * math.ulp(now_s))
        for name, transfer in [*self._moving.items()]:
            if transfer.left_bytes <= transfer.rate * rounding_s:
                del self._moving[name]
                self._arriving[name] = now_s + transfer.latency_s
                self._is_stale = True
        arrived = [name for name, at_s in self._arriving.items() if at_s <= now_s]
        arrived.sort(key=self._arriving.__getitem__)
        for name in arrived:
            del self._arriving[name]
        return arrived

    @property
    def due_s(self) -> float:
        """The time of the next change: a transfer leaves its ports, or arrives. Infinity without one."""
        self._find_rates()
        ends = (self._now_s + transfer.left_bytes / transfer.rate for transfer in self._moving.values())
        return min(min(ends, default=math.inf), min(self._arriving.values(), default=math.inf))

    def rates(self) -> dict[T, float]:
        """Bytes a second of each transfer that is under way."""
        self._find_rates()
        return {name: transfer.rate for name, transfer in self._moving.items()}

    def _advance(self, now_s: float) -> None:
        seconds = now_s - self._now_s
        if self._moving and seconds > 0:
            self._find_rates()
            for transfer in self._moving.values():
                moved = min(transfer.left_bytes, transfer.rate * seconds)
                transfer.left_bytes -= moved
                for port, part in transfer.uses.items():
                    self.carried_bytes[port] += moved * part
        self._now_s = max(self._now_s, now_s)

    def _find_rates(self) -> None:
        """By progressive filling. Each port that fills up ends the rise of its transfers."""
        if not self._is_stale:
            return
        self._is_stale = False
        transfers = [*self._moving.values()]
        loads: dict[str, _Load] = {}
        for number, transfer in enumerate(transfers):
            for port, part in transfer.uses.items():
                if (load := loads.get(port)) is None:
                    load = loads[port] = _Load(self._bytes_s[port])
                load.users[number] = part
                load.weight += part
        while loads:
            full, rate = "", math.inf
            for port, load in loads.items():
                if (level := load.free / load.weight) < rate:
                    full, rate = port, level
            for number in [*loads[full].users]:
                transfers[number].rate = rate
                for port, part in transfers[number].uses.items():
                    load = loads[port]
                    del load.users[number]
                    load.weight -= part
                    load.free = max(0.0, load.free - rate * part)
                    if not load.users:
                        del loads[port]
