import pytest

from flexmarl.transport.errors import NoPath
from flexmarl.transport.handle import PathName
from flexmarl.transport.select import Place, check_reach, select_path, this_host

HERE = Place("h1", "p1")
NEIGHBOUR = Place("h1", "p2")
AWAY = Place("h2", "p3")


@pytest.mark.parametrize(("destination", "path"), [(HERE, "local"), (NEIGHBOUR, "shm"), (None, "shm")])
def test_the_table(destination: Place | None, path: str) -> None:
    assert select_path(HERE, destination, devices={"cpu"}, size_bytes=8) == path


def test_no_path_leaves_the_host() -> None:
    with pytest.raises(NoPath, match=r"from h1 to h2 \(8 bytes on cpu, cuda\)"):
        select_path(HERE, AWAY, devices={"cuda", "cpu"}, size_bytes=8)


@pytest.mark.parametrize(
    ("path", "destination", "where"),
    [("local", NEIGHBOUR, "process"), ("local", AWAY, "host"), ("shm", AWAY, "host")],
)
def test_a_handle_is_not_read_by_another_path_than_its_own(
    path: PathName, destination: Place, where: str
) -> None:
    with pytest.raises(NoPath, match=f"path '{path}' does not leave its {where}"):
        check_reach(path, HERE, destination, devices={"cpu"}, size_bytes=8)


@pytest.mark.parametrize(("path", "destination"), [("local", HERE), ("shm", HERE), ("shm", NEIGHBOUR)])
def test_a_handle_is_read_where_its_path_reaches(path: PathName, destination: Place) -> None:
    check_reach(path, HERE, destination, devices=set(), size_bytes=0)


def test_the_host_is_named_once() -> None:
    assert this_host() is this_host()
    assert "/" in this_host()
