"""Processes that are forked from this one as it was before its first test.

A test leaves threads, locks that these hold, sockets, and states in which a library refuses a fork: torch computes no
gradient in the fork of a process whose autograd has threads. So the server of all forks is itself forked as soon as the
tests are collected. A new interpreter would be as clean, but takes seconds to import torch and transformers, which this
process has imported by then, together with the modules of all functions that tests may run in a fork.
"""

import gc
import os
import signal
import socket
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Final, NoReturn

import psutil

from flexmarl.core.base.collector import spare_collector

from ...patience import PATIENCE_S

_OUTPUTS: Final = (1, 2)


class ForkServer:
    """A process that forks others from ``open`` to ``close``, or to the end of this one. Its forks end with it."""

    def __init__(self) -> None:
        self._pid = 0

    def open(self) -> None:
        # Packets: a stream would join two requests, and leave one of them without its descriptor.
        self._requests, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Else the collector of either process copies the pages of all modules.
        spare_collector()
        with warnings.catch_warnings():
            # The thread of pytest-xdist that reads a pipe holds no lock that a fork needs.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if not self._pid:
            self._requests.close()
            _serve(requests)
        requests.close()

    def fork(self, function: Callable[..., None], *arguments: Any) -> tuple[psutil.Process, Connection]:
        """A new process that runs ``function(connection, *arguments)``, which are pickled, and the other end of the
        connection. It writes where this process does now: pytest shows what a test has written."""
        connection, end = Pipe()
        with end:
            socket.send_fds(self._requests, [b"fork"], [end.fileno(), *_OUTPUTS])
        assert connection.poll(PATIENCE_S), "no process was forked"
        process = psutil.Process(connection.recv())
        connection.send((function, arguments))
        return process, connection

    def close(self) -> None:
        """Kills the server, and what is left of its forks; does nothing if it was not opened."""
        if self._pid:
            self._requests.close()
            os.waitpid(self._pid, 0)
            self._pid = 0


SERVER: Final = ForkServer()
"""It is open while the tests of this folder run (``conftest.py``)."""


def _serve(requests: socket.socket) -> None:
    """Ends with its process, and those of its forks that live."""
    try:
        os.setsid()
        gc.enable()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets processes that have ended
        while True:
            request, descriptors, _, _ = socket.recv_fds(requests, 16, 1 + len(_OUTPUTS))
            if not request:
                break
            if not os.fork():
                requests.close()
                _run(*descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
    except BaseException:  # noqa: BLE001  # nothing of pytest may run in this process
        traceback.print_exc()
    finally:
        os.killpg(0, signal.SIGKILL)


def _run(descriptor: int, *outputs: int) -> NoReturn:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for output, target in zip(outputs, _OUTPUTS, strict=True):
            os.dup2(output, target)
            os.close(output)
        with Connection(descriptor) as connection:
            connection.send(os.getpid())
            function, arguments = connection.recv()
            function(connection, *arguments)
    except BaseException:  # noqa: BLE001  # nothing of the server may run in this process
        traceback.print_exc()
    finally:
        os._exit(0)
