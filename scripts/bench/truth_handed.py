"""Seconds in which one process hands padded samples to others, as trainers do in which one process has all of them.

    sent        columns in one piece of memory, ``torch.save``, a pickle of that, and its copy in memory that processes
                share
    received    the pickle's contents, ``torch.load``, and joining the parts of all senders

Each is a copy or more of all bytes, and memory that is new costs as much again. It is the way of verl's ``DataProto``
through Ray (``verl/protocol.py``), for the page's comparison with that publication.
"""

import io
import pickle
import time
from collections.abc import Mapping
from multiprocessing.shared_memory import SharedMemory
from typing import Final

import torch
from torch import Tensor

_ROWS: Final = 64
_WIDTHS: Final = (2048, 28672, 30720, 30720, 30720, 28672)
_ROUNDS: Final = 5
_GIGA: Final = 1e9


def handed() -> dict[str, float]:
    """Seconds of a processor for a GB that is sent, and for one that is received: the least of some rounds."""
    torch.set_num_threads(1)
    rounds = [_round() for _ in range(_ROUNDS)]
    return {key: round(min(row[key] for row in rounds), 2) for key in rounds[0]}


def _round() -> dict[str, float]:
    columns = {str(number): torch.randint(0, 150_000, (_ROWS, width)) for number, width in enumerate(_WIDTHS)}
    size = sum(column.nbytes for column in columns.values())
    began_s = time.process_time()
    memory, written = _sent(columns, size)
    sent_s = time.process_time()
    try:
        _received(memory, written)
        received_s = time.process_time()
    finally:
        memory.close()
        memory.unlink()
    return {"sent": (sent_s - began_s) / size * _GIGA, "received": (received_s - sent_s) / size * _GIGA}


def _sent(columns: Mapping[str, Tensor], size: int) -> tuple[SharedMemory, int]:
    whole, at, parts = torch.empty(size // 8, dtype=torch.int64), 0, {}
    for name, column in columns.items():
        parts[name] = whole[at : at + column.numel()].view(column.shape).copy_(column)
        at += column.numel()
    saved = io.BytesIO()
    torch.save(parts, saved)
    pickled = pickle.dumps((saved.getvalue(), {}))
    memory = SharedMemory(create=True, size=len(pickled))
    assert memory.buf is not None, "it is open"
    memory.buf[: len(pickled)] = pickled
    return memory, len(pickled)


def _received(memory: SharedMemory, written: int) -> None:
    assert memory.buf is not None, "it is open"
    saved, _ = pickle.loads(bytes(memory.buf[:written]))  # noqa: S301  # of this process
    parts = torch.load(io.BytesIO(saved), weights_only=True)
    for column in parts.values():
        torch.cat([column[: _ROWS // 2], column[_ROWS // 2 :]])
