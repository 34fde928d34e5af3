"""The processes of one host: one works, the others wait for its status."""

import socket
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from flexmarl.launch.torchrun.local_ranks import Leader, follow

from ...patience import PATIENCE_S


@pytest.fixture
def gathering() -> str:
    return f"tests {uuid.uuid4()}"


@pytest.mark.parametrize("status", [0, 1, 130])
def test_all_processes_of_a_host_end_with_the_status_of_the_one_that_works(
    gathering: str, status: int
) -> None:
    with ThreadPoolExecutor() as threads, Leader(gathering, 3) as leader:
        followers = [threads.submit(follow, gathering) for _ in range(3)]
        assert leader.release(status) == 0
        assert [follower.result(PATIENCE_S) for follower in followers] == [status] * 3


def test_a_follower_may_come_first(gathering: str) -> None:
    with ThreadPoolExecutor() as threads:
        follower = threads.submit(follow, gathering)
        with Leader(gathering, 1) as leader:
            assert leader.release(0) == 0
        assert follower.result(PATIENCE_S) == 0


def test_the_followers_of_a_killed_process_end_with_a_failure(gathering: str) -> None:
    code = (
        "import sys; from flexmarl.launch.torchrun.local_ranks import Leader\n"
        f"with Leader({gathering!r}, 1) as leader:\n"
        "    kept = leader._socket.accept(); print('met', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-P", "-c", code]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
        ThreadPoolExecutor() as threads,
    ):
        follower = threads.submit(follow, gathering)
        assert process.stdout is not None
        assert process.stdout.readline() == b"met\n"
        assert not follower.done()
        process.kill()
        assert follower.result(PATIENCE_S) == 1


def test_neither_waits_for_ever(gathering: str) -> None:
    assert follow(gathering, wait_s=0) == 1
    with Leader(gathering, 2) as leader, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as follower:
        follower.connect(leader._address)  # there before the wait begins, which the other one misses
        assert leader.release(7, wait_s=0.5) == 1
        assert follower.recv(1) == b"\x07"


def test_there_is_one_leader(gathering: str) -> None:
    with Leader(gathering, 0), pytest.raises(OSError, match="in use"), Leader(gathering, 0):
        pass
