"""Processes of this machine that are the ranks of one gang, dealt to hosts, and compute there."""

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing.connection import Connection
from typing import Any, Final, Self

import torch

from flexmarl.actors.trainer.backends.torch_policy.gang_meeting import LOOPBACK, Meeting, Membership
from flexmarl.launch.bench.namespaces import Host, enter

HERE: Final = Host("here", LOOPBACK)

RANK_S: Final = 900.0
"""The deadline of a rank: for the others to come, for a collective, and for its result."""


class GangProcess:
    """A new process that has imported torch: the ranks of gangs, one gang after another, are forks of it. The imports
    take longer than a small computation."""

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._gangs, far = context.Pipe()
        self._process = context.Process(target=_fork_gangs, args=(far,))
        self._process.start()
        far.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._gangs.close()
        self._process.join()

    def compute(
        self,
        compute: Callable[..., Any],
        *arguments: Any,
        ranks: int,
        hosts: Sequence[Host] = (HERE,),
        replicas: int = 1,
        joining: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> list[Any]:
        """The results of ``compute(gang, *arguments)`` by rank, each in a process with one thread for torch.

        ``hosts``: each has as many ranks as the others, the first ones on the first. ``joining``: a context in which a
        rank joins its gang. Raises RuntimeError with the traceback of a rank that has failed.
        """
        with ThreadPoolExecutor(1, initializer=enter, initargs=(hosts[0],)) as thread:
            meeting = thread.submit(Meeting, hosts[0].address).result(RANK_S)
        calls = [
            (
                hosts[rank * len(hosts) // ranks],
                (rank, ranks, meeting.address, torch.device("cpu"), RANK_S),
                *(replicas, joining, compute, arguments),
            )
            for rank in range(ranks)
        ]
        try:
            self._gangs.send(calls)
            results, error = self._gangs.recv()
        finally:
            meeting.close()
        if error is not None:
            raise RuntimeError(error)
        return list(results)


def _fork_gangs(gangs: Connection) -> None:
    """In the process that forks: each call is of a rank. Ends when the other end of ``gangs`` is closed."""
    with suppress(EOFError):
        while True:
            gangs.send(_results_of(gangs.recv()))


def _results_of(calls: Sequence[tuple[Any, ...]]) -> tuple[list[Any], str | None]:
    """The results of the ranks, and the error of the first one that has failed."""
    context = multiprocessing.get_context("fork")
    connections, processes = [], []
    try:
        for call in calls:
            connection, far = context.Pipe()
            process = context.Process(target=_serve_rank, args=(far, *call), daemon=True)
            process.start()
            far.close()
            connections.append(connection)
            processes.append(process)
        return [_result_of(connection) for connection in connections], None
    except RuntimeError as error:
        return [], str(error)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _result_of(connection: Connection) -> Any:
    if not connection.poll(RANK_S):
        raise RuntimeError(f"a rank has not answered for {RANK_S:g} s")
    try:
        result, error = connection.recv()
    except EOFError:
        raise RuntimeError("a rank has ended without a result") from None
    if error is not None:
        raise RuntimeError(error)
    return result


def _serve_rank(
    connection: Connection,
    host: Host,
    place: tuple[Any, ...],
    replicas: int,
    joining: Callable[[], AbstractContextManager[object]],
    compute: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    enter(host)
    torch.set_num_threads(1)
    membership = Membership(*place, replicas=replicas)
    try:
        with joining():
            gang = membership.join()
        connection.send((compute(gang, *arguments), None))
    except Exception:  # noqa: BLE001  # the parent raises it
        connection.send((None, traceback.format_exc()))
    finally:
        membership.leave()
