"""The server of forks: what a test does in this process stays here, and no fork outlives the server."""

import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ...patience import PATIENCE_S
from .forks import SERVER, ForkServer

MOST_NESTED_BACKWARDS = 60  # in one thread: torch's MAX_DEPTH


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    server.open()
    yield server
    server.close()


class NestedBackward(torch.autograd.Function):
    """Its backward runs one of ``depth`` more."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, depth: int) -> torch.Tensor:
        context.depth = depth
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if context.depth:
            with torch.enable_grad():
                start_backward(context.depth - 1)
        return gradient, None


def start_backward(depth: int) -> None:
    tensor = torch.ones(1, requires_grad=True)
    torch.autograd.backward(NestedBackward.apply(tensor, depth))  # type: ignore[no-untyped-call]


def send_gradient(connection: Connection) -> None:
    tensor = torch.ones(1, requires_grad=True)
    torch.autograd.backward(3.0 * tensor)
    assert tensor.grad is not None
    connection.send(float(tensor.grad))


def can_fork_compute() -> bool:
    """True if a fork of this process computes gradients."""
    pid = os.fork()
    if not pid:
        try:
            start_backward(0)
        except BaseException:  # noqa: BLE001  # nothing of pytest may run in the fork
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def received(connection: Connection) -> object:
    assert connection.poll(PATIENCE_S)
    return connection.recv()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_forks_compute_gradients_after_autograd_has_started_threads_here() -> None:
    start_backward(MOST_NESTED_BACKWARDS + 1)
    assert not can_fork_compute()
    process, connection = SERVER.fork(send_gradient)
    assert received(connection) == 3.0
    process.wait(PATIENCE_S)


def fail(_connection: Connection, word: str) -> None:
    raise ValueError(word)


def test_an_error_ends_the_connection_and_is_among_the_tests_output(
    capfd: pytest.CaptureFixture[str],
) -> None:
    process, connection = SERVER.fork(fail, "unlucky")
    with pytest.raises(EOFError):
        received(connection)
    process.wait(PATIENCE_S)
    assert "ValueError: unlucky" in capfd.readouterr().err


def sleep(connection: Connection) -> None:
    connection.send("asleep")
    while True:
        time.sleep(PATIENCE_S)


def test_forks_end_with_the_server(server: ForkServer) -> None:
    process, connection = server.fork(sleep)
    assert received(connection) == "asleep"
    server.close()
    process.wait(PATIENCE_S)


def count_descriptors(connection: Connection) -> None:
    connection.send(psutil.Process().num_fds())


def test_forks_have_no_descriptors_of_one_another_and_of_tests(tmp_path: Path) -> None:
    counts = []
    for _ in range(2):
        with (tmp_path / "file").open("w"):
            process, connection = SERVER.fork(count_descriptors)
            counts.append((received(connection), connection))
            process.wait(PATIENCE_S)
    assert counts[0][0] == counts[1][0]
