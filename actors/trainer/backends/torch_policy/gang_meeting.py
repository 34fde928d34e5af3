"""The meeting of a gang's processes: they find one another at a store, and make a process group.

    Meeting     the store, in the process of the first rank, at an address of its own and a free port
    Membership  a process in one gang: ``join``, ``leave``, and ``abort`` from another thread

An address of this host alone (``LOOPBACK``) keeps all connections of the gang on the host. With any other address each
rank listens where it reaches the store from. Neither the store nor the process group encrypts, or proves who a peer is.
"""

import ipaddress
import json
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from ....errors import GangIncomplete
from .gang_rank import ALONE, GangRank, mesh_of
from .tcp_connections import Connection, Endpoint, cut_connections, tcp_connections

MEETING_S: Final = 120.0
"""A rank waits at the store so long for the others. All have their state by then: only models that are built from files
of different speed may make them late."""

COLLECTIVE_S: Final = 1800.0
"""A collective call waits so long for ranks that live and are late, such as those that read or write a slow disk. The
loss of a rank ends it at once."""

LOOPBACK: Final = "127.0.0.1"

_TRY_S: Final = 1.0
"""A try to reach the store takes so long at most. ``abort`` has an effect behind it: less than a drop of a policy may
take."""

c10d: Any = distributed  # half of its names have no types
distributed_c10d: Any = distributed.distributed_c10d

_GLOO: Final = "gloo_of_gang"


class Meeting:
    """The store of one gang, served by this process until ``close``. ``address``: HOST:PORT/ID, for all ranks; the id
    is new for each gang."""

    def __init__(self, host: str) -> None:
        """``host``: the address to listen on, at any free port. Raises OSError."""
        # torch's own server listens on all addresses of the host: it is given a socket instead.
        listening = socket.create_server((host, 0), family=_family(host))
        port = listening.getsockname()[1]
        self._store = c10d.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=MEETING_S),
            master_listen_fd=listening.detach(),
        )
        # Ports are given again: a rank of an earlier gang, of a host that was cut off for a while, may come late.
        self.address = f"{host}:{port}/{uuid.uuid4().hex}"

    def close(self) -> None:
        """Ends the store; ranks that wait there fail."""
        self._store = None


class Membership:
    """This process as ``rank`` of a gang of ``size``, in ``replicas``, which meets at ``meeting``: an address that no
    gang has used before. A process can be in one gang at a time, and in any number one after the other."""

    def __init__(
        self,
        rank: int,
        size: int,
        meeting: str,
        device: torch.device,
        meeting_s: float = MEETING_S,
        *,
        replicas: int = 1,
    ) -> None:
        self._rank, self._size, self._replicas = rank, size, replicas
        self._meeting, self._meeting_s = meeting, meeting_s
        self._device = device
        self._connections: set[Connection] = set()
        self._groups: list[Any] = []
        self._is_aborted = False

    def join(self) -> GangRank:
        """The gang, when all its processes have come; one process alone has no process group. Raises as
        ``join_group``."""
        return ALONE if self._size == 1 else self.join_group()

    def join_group(self) -> GangRank:
        """The gang with a process group, also of one process.

        Raises GangIncomplete if some don't come within ``meeting_s``, RuntimeError (``torch.distributed.DistError``)
        if one of them dies, or after ``abort``; so does each collective call later.
        """
        host, port, gang = _endpoint(self._meeting)
        before = tcp_connections()
        server = self._reach(host, port)
        to_store = {new for new in tcp_connections() - before if new.peer[1] == port}
        self._connections |= to_store
        store = c10d.PrefixStore(gang, server)
        self._wait_for_others(store)
        # torch numbers groups, and caches meshes by their ranks alone: each gang of a process must get the same number.
        distributed_c10d._world.group_count = 0
        if self._device.type == "cuda":
            mesh = self._init_nccl(store)
        else:
            mesh = self._init_gloo(store, next(iter(to_store)).local[0])
        self._groups = [*dict.fromkeys([distributed.group.WORLD, *mesh.get_all_groups()])]
        self._check()
        return GangRank(self._rank, self._size, mesh, replicas=self._replicas)

    def leave(self) -> None:
        """Ends the process group, if there is one, and all that the device still computes of it. To be called by the
        thread that has joined, before memory of its tensors is used for others."""
        if self._groups:
            self._groups.clear()
            distributed.destroy_process_group()
        self._connections.clear()
        if self._is_aborted and self._device.type == "cuda":
            # FSDP2 adds up gradients on streams of its own, behind calls that have just been aborted: a copy of another
            # policy's state to the same memory would not wait for them.
            torch.cuda.synchronize(self._device)

    def abort(self) -> None:
        """Ends the call that waits for other ranks, or the next one, with an error. Ranks that wait for this one notice
        it, others have to be aborted too.

        May be called by any thread, and again: a call between two steps of ``join`` may have no effect yet.
        """
        self._is_aborted = True
        # gloo's own ``abort`` does not end a collective that waits: its connections have to.
        cut_connections(set(self._connections))
        if self._device.type == "cuda" and (groups := list(self._groups)):
            # At the same time: NCCL ends a group when the device has done its calls, and these may be queued behind
            # one of another group, which waits for the rank that was lost (https://github.com/pytorch/pytorch/issues/119797).
            with ThreadPoolExecutor(len(groups)) as threads:
                list(threads.map(lambda group: group._get_backend(self._device).abort(), groups))

    def _check(self) -> None:
        if self._is_aborted:
            raise c10d.DistError(f"rank {self._rank} of a gang was aborted: another one was lost")

    def _reach(self, host: str, port: int) -> Any:
        """The store. Its process may have died since: torch would try again until the deadline, and ``abort`` would
        find no connection to end."""
        deadline = time.monotonic() + self._meeting_s
        while True:
            self._check()
            try:
                server = c10d.TCPStore(
                    host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_TRY_S)
                )
                break
            except c10d.DistError:
                if time.monotonic() > deadline:
                    raise
        server.set_timeout(timedelta(seconds=self._meeting_s))
        return server

    def _wait_for_others(self, store: Any) -> None:
        keys = [f"rank-{rank}" for rank in range(self._size)]
        store.set(keys[self._rank], "here")
        try:
            store.wait(keys, timedelta(seconds=self._meeting_s))
        except c10d.DistStoreError as error:  # the deadline; a lost connection is a DistNetworkError
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            place, _, _ = self._meeting.partition("/")
            raise GangIncomplete(missing, self._size, place, self._meeting_s) from error

    def _init_gloo(self, store: Any, host: str) -> DeviceMesh:
        """``host``: the address of this rank's connections."""

        options = c10d.ProcessGroupGloo._Options()
        # Gloo as torch makes it listens at the address of the host's name, for any peer of the network.
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=self._meeting_s)
        before = tcp_connections()
        self._init_group(_GLOO, store, options=options)
        mesh = mesh_of("cpu", self._size, self._replicas, options)
        self._connections |= self._shared_with_others(store, tcp_connections() - before)
        return mesh

    def _init_nccl(self, store: Any) -> DeviceMesh:
        device = torch.device("cuda", self._device.index or 0)
        torch.cuda.set_device(device)
        self._init_group("nccl", store, device=device)
        mesh = mesh_of("cuda", self._size, self._replicas)
        for group in mesh.get_all_groups():  # those of replicas have torch's default, ten minutes
            distributed_c10d._set_pg_timeout(timedelta(seconds=COLLECTIVE_S), group)
        return mesh

    def _init_group(
        self, backend: str, store: Any, *, device: torch.device | None = None, options: Any = None
    ) -> None:
        try:
            distributed.init_process_group(
                backend,
                store=store,
                rank=self._rank,
                world_size=self._size,
                timeout=timedelta(seconds=COLLECTIVE_S),
                device_id=device,
                pg_options=options,
            )
        finally:
            # Also if a rank is lost while the others wait for it there: torch keeps the group, and would make no other.
            if distributed.is_initialized():
                self._groups = [distributed.group.WORLD]

    def _shared_with_others(self, store: Any, candidates: set[Connection]) -> set[Connection]:
        """The ``candidates`` whose other ends are at ranks of this gang: other threads connect too."""
        store.set(f"connections-{self._rank}", json.dumps(list(candidates)))
        ends: set[tuple[Endpoint, Endpoint]] = set()
        for rank in range(self._size):
            listed = json.loads(store.get(f"connections-{rank}"))
            ends |= {(tuple(peer), tuple(local)) for local, peer in listed}
        return {connection for connection in candidates if tuple(connection) in ends}


def _make_gloo(about: Any, options: Any) -> Any:
    """Gloo that connects within the timeout of ``options``, and computes within ``COLLECTIVE_S``."""
    # Not ``about.timeout``: a mesh makes its groups with the timeout of the options.
    group = c10d.ProcessGroupGloo(about.store, about.group_rank, about.group_size, options)
    group._set_default_timeout(timedelta(seconds=COLLECTIVE_S))
    return group


distributed.Backend.register_backend(_GLOO, _make_gloo, extended_api=True, devices="cpu")


def _endpoint(address: str) -> tuple[str, int, str]:
    endpoint, _, gang = address.partition("/")
    host, _, port = endpoint.rpartition(":")
    return host, int(port), gang


def _family(host: str) -> socket.AddressFamily:
    try:
        is_v6 = ipaddress.ip_address(host).version == 6
    except ValueError:  # a name
        is_v6 = False
    return socket.AF_INET6 if is_v6 else socket.AF_INET
