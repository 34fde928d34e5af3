import socket
from dataclasses import replace
from pathlib import Path

import pytest

from flexmarl.transport.errors import NoPath
from flexmarl.transport.handle import CudaIpcSource, PathName, ShmSource, TcpSource
from flexmarl.transport.select import Place, Reader, choose, this_node

HERE = Reader(Place("h1", "p1"), encrypted=True)
NEIGHBOUR = Reader(Place("h1", "p2"), encrypted=True)
AWAY = Reader(Place("h2", "p3"), encrypted=True)
SHM = ShmSource("shm", "h1", "p1", "a.arena", 2)
TCP = TcpSource("tcp", "h1", "p1", "h1:5555", True, "a.arena", 2)
IPC = CudaIpcSource("cuda_ipc", "h1", "p1", "GPU-a", "c.arena", 2, ())
SEES_BOTH = replace(NEIGHBOUR, visible=frozenset({"GPU-a", "GPU-b"}))
SEES_ITS_OWN = replace(NEIGHBOUR, visible=frozenset({"GPU-b"}))


@pytest.mark.parametrize(("reader", "path"), [(NEIGHBOUR, "shm"), (AWAY, "tcp")])
def test_the_fastest_source_that_reaches_the_reader_is_chosen(reader: Reader, path: str) -> None:
    choice = choose(reader, [TCP, SHM], devices={"cpu"}, size_bytes=8)
    assert (choice.path, choice.source.path) == (path, path)
    assert (
        choice.reason == {"shm": "the same node: shared memory", "tcp": "over the network from h1:5555"}[path]
    )


def test_the_reason_against_a_faster_source_is_kept() -> None:
    choice = choose(AWAY, [TCP, SHM], devices={"cpu"}, size_bytes=8)
    assert choice.refused == {"shm": "it does not leave its node h1"}
    assert choose(HERE, [TCP, SHM], devices={"cpu"}, size_bytes=8).refused == {}


def test_a_forced_path_is_taken_also_if_another_is_faster() -> None:
    choice = choose(HERE, [SHM, TCP], devices={"cpu"}, size_bytes=8, path="tcp")
    assert choice.source is TCP and choice.reason.startswith("forced; over the network")


@pytest.mark.parametrize(
    ("devices", "path"), [({"GPU-a"}, "cuda_ipc"), ({"GPU-b", "cpu"}, "cuda_ipc"), ({"cpu"}, "shm")]
)
def test_device_memory_is_read_by_devices_and_shared_memory_by_cpus(devices: set[str], path: str) -> None:
    choice = choose(SEES_BOTH, [SHM, IPC], devices=devices, size_bytes=8)
    assert choice.path == path and not choice.is_downgrade
    assert choose(SEES_BOTH, [IPC], devices=devices, size_bytes=8).path == "cuda_ipc"


@pytest.mark.parametrize(
    ("reader", "devices", "reason"),
    [
        (HERE, {"GPU-a"}, "a process can't open its own device memory"),
        (NEIGHBOUR, {"cpu", "GPU-c"}, "this process has no device"),
        (
            replace(SEES_BOTH, unreachable=frozenset({("GPU-b", "GPU-a")})),
            {"GPU-b"},
            "device GPU-b can't read the memory of GPU-a",
        ),
        (replace(SEES_ITS_OWN, refusals={("p1", "GPU-a"): "no peer access"}), {"GPU-b"}, "no peer access"),
        (AWAY, {"GPU-a"}, "it does not leave its node h1"),
    ],
)
def test_device_memory_that_can_not_be_opened_is_a_downgrade_with_a_reason(
    reader: Reader, devices: set[str], reason: str
) -> None:
    with pytest.raises(NoPath, match=f"path 'cuda_ipc': {reason}"):
        choose(reader, [IPC, SHM], devices=devices, size_bytes=8, path="cuda_ipc")
    if reader is not AWAY:
        choice = choose(reader, [IPC, SHM], devices=devices, size_bytes=8)
        assert choice.path == "shm" and choice.is_downgrade and choice.refused.keys() == {"cuda_ipc"}


def test_cards_of_a_host_that_each_see_only_themselves_reach_each_other() -> None:
    choice = choose(SEES_ITS_OWN, [SHM, IPC], devices={"GPU-b"}, size_bytes=8)
    assert (choice.path, choice.refused) == ("cuda_ipc", {})
    of_another = replace(SEES_ITS_OWN, refusals={("p0", "GPU-a"): "no peer access"})
    assert choose(of_another, [SHM, IPC], devices={"GPU-b"}, size_bytes=8).path == "cuda_ipc"


def test_a_path_that_its_owner_withholds_is_a_downgrade_with_its_reason() -> None:
    withheld: dict[PathName, str] = {"cuda_ipc": "a part of a device"}
    choice = choose(SEES_BOTH, [SHM], devices={"GPU-a"}, size_bytes=8, withheld=withheld)
    assert (choice.path, choice.refused, choice.is_downgrade) == ("shm", withheld, True)
    assert not choose(SEES_BOTH, [SHM], devices={"cpu"}, size_bytes=8, withheld=withheld).is_downgrade
    with pytest.raises(NoPath, match="path 'cuda_ipc': a part of a device"):
        choose(SEES_BOTH, [SHM], devices={"GPU-a"}, size_bytes=8, path="cuda_ipc", withheld=withheld)


def test_memory_does_not_leave_its_host() -> None:
    with pytest.raises(NoPath, match=r"to h2, process p3 \(8 bytes to cpu, cuda\)") as raised:
        choose(AWAY, [IPC, SHM], devices={"cuda", "cpu"}, size_bytes=8)
    assert raised.value.refused == {
        "cuda_ipc": "it does not leave its node h1",
        "shm": "it does not leave its node h1",
    }


@pytest.mark.parametrize(
    ("path", "reader", "reason"),
    [
        ("cuda_ipc", AWAY, "does not leave its node h1"),
        ("shm", AWAY, "does not leave its node h1"),
    ],
)
def test_a_forced_path_is_never_replaced_by_another(path: PathName, reader: Reader, reason: str) -> None:
    with pytest.raises(NoPath, match=f"path '{path}': it {reason}"):
        choose(reader, [IPC, SHM, TCP], devices={"cpu"}, size_bytes=8, path=path)


def test_a_path_that_is_not_offered_is_refused_by_name() -> None:
    with pytest.raises(NoPath, match=r"path 'shm': not offered \(there is tcp\)"):
        choose(HERE, [TCP], devices={"cpu"}, size_bytes=8, path="shm")
    with pytest.raises(NoPath, match="no source"):
        choose(HERE, [], devices=set(), size_bytes=0)


def test_nodes_of_one_machine_are_distinguished_by_their_directories() -> None:
    assert this_node(Path("/dev/shm/a")) == this_node(Path("/dev/shm/a"))
    assert this_node(Path("/dev/shm/a")) != this_node(Path("/dev/shm/b"))
    assert socket.gethostname() in this_node(Path("/dev/shm/a"))
