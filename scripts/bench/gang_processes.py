"""Processes of this machine that are the ranks of one gang, dealt to hosts, and compute there."""

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from flexmarl.actors.trainer.backends.torch_policy.gang_meeting import LOOPBACK, Meeting, Membership
from flexmarl.launch.bench.namespaces import Host, enter

HERE: Final = Host("here", LOOPBACK)

RANK_S: Final = 900.0
"""The deadline of a rank: for the others to come, for a collective, and for its result."""


def compute_in_gang(
    compute: Callable[..., Any],
    *arguments: Any,
    ranks: int,
    hosts: Sequence[Host] = (HERE,),
    replicas: int = 1,
    joining: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[Any]:
    """The results of ``compute(gang, *arguments)`` by rank, each in a process with one thread for torch.

    ``hosts``: each has as many ranks as the others, the first ones on the first. ``joining``: a context in which a rank
    joins its gang. Raises RuntimeError with the traceback of a rank that has failed.
    """
    context = multiprocessing.get_context("spawn")
    with ThreadPoolExecutor(1, initializer=enter, initargs=(hosts[0],)) as thread:
        meeting = thread.submit(Meeting, hosts[0].address).result(RANK_S)
    connections, processes = [], []
    try:
        for rank in range(ranks):
            connection, far = context.Pipe()
            host = hosts[rank * len(hosts) // ranks]
            place = (rank, ranks, meeting.address, torch.device("cpu"), RANK_S)
            process = context.Process(
                target=_serve_rank,
                args=(far, host, place, replicas, joining, compute, arguments),
                daemon=True,
            )
            process.start()
            far.close()
            connections.append(connection)
            processes.append(process)
        return [_result_of(connection) for connection in connections]
    finally:
        for process in processes:
            process.kill()
            process.join()
        meeting.close()


def _result_of(connection: Connection) -> Any:
    if not connection.poll(RANK_S):
        raise RuntimeError(f"a rank has not answered for {RANK_S:g} s")
    result, error = connection.recv()
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
