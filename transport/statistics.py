"""The figures of a transport."""

from dataclasses import asdict, dataclass, field

from .handle import PathName


@dataclass(slots=True)
class PathStatistics:
    """Totals of one path since the transport was opened; transfers that failed are not counted."""

    sets: int = 0
    set_bytes: int = 0
    set_s: float = 0.0
    gets: int = 0
    get_bytes: int = 0
    get_s: float = 0.0


@dataclass(slots=True)
class NetworkStatistics:
    """Bytes of states that were exchanged with other hosts, and of these the bytes of deltas. ``relayed_bytes``: that
    have come from copies on other hosts, and not from the owner; ``relays_left``: copies that were given up for the
    owner. ``reconnects``: connections that ended during a fetch. ``refused``: connections without the keys of the
    run."""

    sent_bytes: int = 0
    sent_delta_bytes: int = 0
    got_bytes: int = 0
    got_delta_bytes: int = 0
    relayed_bytes: int = 0
    relays_left: int = 0
    reconnects: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one device."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """The path that the last Get of a key took, and the reason. ``refused``: the reason against each faster one."""

    path: PathName
    reason: str
    refused: dict[PathName, str]


@dataclass(frozen=True, slots=True)
class TransportStatistics:
    """``by_path``: of the paths that were used. ``running``: copies in threads now. ``arena_bytes``: size of the host
    memory that this process has made for states, of which ``spare_bytes`` hold none. ``devices``: by
    UUID. ``chosen``: by key. ``network``: None without other hosts."""

    by_path: dict[PathName, PathStatistics]
    running: int
    arena_bytes: int
    spare_bytes: int = 0
    devices: dict[str, MemoryUse] = field(default_factory=dict)
    chosen: dict[str, Chosen] = field(default_factory=dict)
    network: NetworkStatistics | None = None

    def numbers(self) -> dict[str, float]:
        """The numbers by name: ``transport_running``, ``transport_arena_bytes``, ``transport_spare_bytes``,
        ``transport_device_<uuid>_free_bytes``, ``transport_<path>_<field>``, ``transport_network_<field>``."""
        by_path = {
            f"transport_{path}_{name}": value
            for path, statistics in self.by_path.items()
            for name, value in asdict(statistics).items()
        }
        devices = {
            f"transport_device_{uuid}_{name}": value
            for uuid, memory in self.devices.items()
            for name, value in asdict(memory).items()
        }
        network = asdict(self.network) if self.network is not None else {}
        return {
            "transport_running": self.running,
            "transport_arena_bytes": self.arena_bytes,
            "transport_spare_bytes": self.spare_bytes,
            **devices,
            **by_path,
            **{f"transport_network_{name}": value for name, value in network.items()},
        }
