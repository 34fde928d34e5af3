"""Gangs of real processes: the addresses they listen at, and ranks that die or stop while the others wait for them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from unittest import mock

import psutil
import pytest
import torch

from flexmarl.actors.errors import GangIncomplete
from flexmarl.actors.trainer.backends.torch_policy import gang_meeting
from flexmarl.actors.trainer.backends.torch_policy.gang_meeting import LOOPBACK, Meeting, Membership

from .....patience import PATIENCE_S
from ...forks import SERVER
from .ranks import is_cut

CPU = torch.device("cpu")


def wait_in_a_collective(
    connection: Connection, rank: int, size: int, replicas: int, meeting: str, meeting_s: float
) -> None:
    """Sums once with all others, and again over its replica when the parent has said so; with its word ``abort``, from
    another thread. Sends the end of that."""
    torch.set_num_threads(1)
    connection.send("started")
    connection.recv()
    membership = Membership(rank, size, meeting, CPU, meeting_s, replicas=replicas)
    gang = membership.join()
    gang.sum(torch.ones(1))
    connection.send("joined")
    connection.recv()

    def obey() -> None:
        while connection.recv() == "abort":
            membership.abort()

    threading.Thread(target=obey, daemon=True).start()
    connection.send("begins")
    try:
        connection.send(float(gang.sum_of_parts(torch.ones(1))))
    except RuntimeError as error:
        connection.send(str(error))
    membership.leave()
    connection.send("left")


class Member:
    def __init__(self, process: psutil.Process, connection: Connection) -> None:
        self.process, self.connection = process, connection

    def receive(self) -> object:
        assert self.connection.poll(PATIENCE_S), "a rank does not answer"
        return self.connection.recv()

    def begin(self) -> None:
        self.connection.send("begin")
        assert self.receive() == "begins"


@contextmanager
def gang_of(
    size: int, host: str = LOOPBACK, meeting_s: float = PATIENCE_S, replicas: int = 1
) -> Iterator[list[Member]]:
    meeting = Meeting(host)
    members = [
        Member(*SERVER.fork(wait_in_a_collective, rank, size, replicas, meeting.address, meeting_s))
        for rank in range(size)
    ]
    try:
        assert [member.receive() for member in members] == ["started"] * size
        for member in members:  # all at once: the start of a process takes any time
            member.connection.send("join")
        assert [member.receive() for member in members] == ["joined"] * size
        yield members
    finally:
        for member in members:
            with suppress(psutil.NoSuchProcess):
                member.process.kill()
            member.process.wait(PATIENCE_S)
            member.connection.close()
        meeting.close()


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """The addresses and ports that a process listens at."""
    connections = process.net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", [LOOPBACK, "127.0.0.5"])
def test_a_gang_listens_where_its_meeting_is_alone(host: str) -> None:
    """All of 127.0.0.0/8 is this host: the second address stands for one in a network."""
    before = listening(psutil.Process())  # of other tests in this process
    with gang_of(2, host) as members:
        by_rank = [listening(member.process) for member in members]
        assert {address for address, _ in by_rank[0] | by_rank[1]} <= {host, LOOPBACK}
        assert {address for address, _ in listening(psutil.Process()) - before} == {host}


@pytest.mark.parametrize("size", [2, 3])
def test_a_killed_rank_ends_the_collective_that_others_wait_in(size: int) -> None:
    with gang_of(size) as (*waiting, dying):
        for member in waiting:
            member.begin()
        dying.process.kill()
        for member in waiting:
            assert is_cut(str(member.receive()))
            assert member.receive() == "left"


def test_a_killed_rank_ends_the_collective_of_its_replica_and_an_abort_that_of_another() -> None:
    with gang_of(4, replicas=2) as (first, second, waiting, dying):
        waiting.begin()
        first.begin()
        dying.process.kill()
        assert is_cut(str(waiting.receive()))
        first.connection.send("abort")  # it waits for the second, which has not begun
        assert is_cut(str(first.receive()))
        assert [member.receive() for member in (first, waiting)] == ["left"] * 2
        second.begin()
        assert is_cut(str(second.receive()))


def test_a_collective_outlives_the_deadline_of_the_meeting_and_ends_by_an_abort() -> None:
    """One rank is stopped: its connections stay."""
    with gang_of(3, meeting_s=4.0) as (first, second, stopped):
        stopped.process.suspend()
        for member in (first, second):
            member.begin()
        assert not first.connection.poll(5.0), "a late rank is waited for"
        for member in (first, second):  # each: a rank that waits for a third one does not notice
            member.connection.send("abort")
            assert is_cut(str(member.receive()))
        assert [member.receive() for member in (first, second)] == ["left"] * 2
        stopped.process.resume()
        stopped.begin()
        assert is_cut(str(stopped.receive()))


def join_in_thread(membership: Membership) -> tuple[list[str], threading.Thread]:
    """The errors of a join, and the thread in which it has begun."""
    ends: list[str] = []

    def join() -> None:
        try:
            membership.join()
        except RuntimeError as error:
            ends.append(str(error))

    joining = threading.Thread(target=join)
    joining.start()
    return ends, joining


def test_an_abort_ends_a_meeting_that_waits_for_others() -> None:
    meeting = Meeting(LOOPBACK)
    membership = Membership(0, 2, meeting.address, CPU, PATIENCE_S)
    ends, joining = join_in_thread(membership)
    while joining.is_alive():  # an abort between two steps of joining has no effect yet
        membership.abort()
        joining.join(0.05)
    membership.leave()
    meeting.close()
    assert len(ends) == 1


def test_an_abort_ends_a_join_whose_meeting_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting(LOOPBACK)
    membership = Membership(1, 2, meeting.address, CPU, PATIENCE_S)
    meeting.close()
    tries = threading.Event()
    store = gang_meeting.c10d.TCPStore

    def reach(*arguments: object, **settings: object) -> object:
        tries.set()
        return store(*arguments, **settings)

    monkeypatch.setattr(gang_meeting.c10d, "TCPStore", reach)
    ends, joining = join_in_thread(membership)
    assert tries.wait(PATIENCE_S)
    membership.abort()
    joining.join(PATIENCE_S)
    membership.leave()
    assert ends == ["rank 1 of a gang was aborted: another one was lost"]


def test_groups_of_a_device_are_aborted_at_the_same_time() -> None:
    """Stands for NCCL: a group ends when the device has done its calls, which wait for those of another group."""
    all_abort = threading.Barrier(3)
    group = mock.Mock()
    group._get_backend.return_value.abort = lambda: all_abort.wait(PATIENCE_S)
    membership = Membership(0, 4, "127.0.0.1:1/gang", torch.device("cuda"), replicas=2)
    membership.abort()  # nothing is there yet
    membership._groups = [group] * 3
    membership.abort()
    assert not all_abort.broken


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_rank_that_leaves_an_aborted_gang_waits_for_its_device(
    monkeypatch: pytest.MonkeyPatch, is_aborted: bool
) -> None:
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    device = torch.device("cuda")
    membership = Membership(0, 2, "127.0.0.1:1/gang", device)
    if is_aborted:
        membership.abort()
    membership.leave()
    assert waited == [device] * is_aborted


def test_all_groups_of_a_device_wait_for_a_late_rank_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: dict[str, float] = {}
    mesh = mock.Mock(**{"get_all_groups.return_value": ["replicate", "shard"]})
    membership = Membership(0, 4, "127.0.0.1:1/gang", torch.device("cuda"), replicas=2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(gang_meeting, "mesh_of", lambda *_arguments: mesh)
    monkeypatch.setattr(membership, "_init_group", lambda *_arguments, **_settings: None)
    monkeypatch.setattr(
        gang_meeting.distributed_c10d,
        "_set_pg_timeout",
        lambda timeout, group: timeouts.update({group: timeout.total_seconds()}),
    )
    assert membership._init_nccl(None) is mesh
    assert timeouts == dict.fromkeys(["replicate", "shard"], gang_meeting.COLLECTIVE_S)


def join_again(connection: Connection) -> None:
    """Joins a gang behind one that was lost when its process group was there, and before ``join`` ended."""
    torch.set_num_threads(1)
    meeting = Meeting(LOOPBACK)
    lost = Membership(0, 1, meeting.address, CPU)
    with mock.patch.object(lost, "_shared_with_others", side_effect=RuntimeError("the store is gone")):
        try:
            lost.join_group()
        except RuntimeError as error:
            connection.send(str(error))
    lost.leave()
    meeting.close()
    other_meeting = Meeting(LOOPBACK)
    other = Membership(0, 1, other_meeting.address, CPU)
    connection.send(float(other.join_group().sum(torch.ones(1))))
    other.leave()
    other_meeting.close()


def test_a_rank_whose_gang_is_lost_while_it_joins_can_join_another() -> None:
    member = Member(*SERVER.fork(join_again))
    try:
        assert [member.receive(), member.receive()] == ["the store is gone", 1.0]
    finally:
        member.process.kill()
        member.process.wait(PATIENCE_S)


def test_a_rank_of_an_earlier_gang_does_not_enter_the_one_that_has_its_port() -> None:
    meeting = Meeting(LOOPBACK)
    endpoint, _, _ = meeting.address.partition("/")
    with pytest.raises(GangIncomplete, match="have not come .* within 0.3 s: 0"):
        Membership(1, 2, f"{endpoint}/earlier", CPU, 0.3).join()
    with pytest.raises(GangIncomplete, match="have not come .* within 0.3 s: 1"):
        Membership(0, 2, meeting.address, CPU, 0.3).join()
    meeting.close()


def test_connections_of_others_are_not_cut() -> None:
    sums: list[float] = []
    with gang_of(2) as members, gang_of(2) as bystanders:
        for member in bystanders[:1]:
            member.begin()
        members[0].begin()
        members[0].connection.send("abort")
        assert is_cut(str(members[0].receive()))
        bystanders[1].begin()
        sums = [float(str(member.receive())) for member in bystanders]
    assert sums == [2.0, 2.0]
