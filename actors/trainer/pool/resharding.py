"""The reads by which a rank gets its rows of a state that another number of ranks has left in the host's memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....transport.handle import StateHandle
from ...messages import HostState, StateBytes
from ..shards import Shard, pieces


@dataclass(frozen=True, slots=True)
class PartialRead:
    """Tensors of ``handle``, the ``rows`` of those that are divided, and the memory for them."""

    handle: StateHandle
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    into: dict[str, Any] = field(default_factory=dict)


def reads_of_rank(
    live: Mapping[str, Any], parts: Mapping[str, Shard], ranks: Sequence[tuple[HostState, StateBytes]]
) -> Iterator[PartialRead]:
    """All rows of ``live``, a rank's live tensors of both parts of a state, whose shards are ``parts``.

    Each row is read once, from the first of ``ranks`` that has it, directly into its place: nothing is gathered. Raises
    ValueError which names a tensor that they don't have.
    """
    shards = {name: parts[name] for name in live}
    sources = [
        {
            name: replace(part, start=layout.rows[name][0], stop=layout.rows[name][1])
            for name, part in shards.items()
            if name in layout.rows
        }
        for _, layout in ranks
    ]
    reads: dict[tuple[int, int], PartialRead] = {}
    unlimited = sum(part.stop - part.start for part in shards.values()) + 1
    for piece in pieces(shards, sources, dict.fromkeys(shards, 1), unlimited):
        state, layout = ranks[piece.source]
        number, handle, name = _find(piece.name, state, layout)
        read = reads.setdefault((piece.source, number), PartialRead(handle))
        tensor = live[piece.name]
        if shards[piece.name].shape:
            read.rows[name] = (piece.source_start, piece.source_start + piece.rows)
            tensor = tensor[piece.own_start : piece.own_start + piece.rows]
        read.into[name] = tensor
    yield from reads.values()


def _find(name: str, state: HostState, layout: StateBytes) -> tuple[int, StateHandle, str]:
    """The handle in which a rank's tensor lies, its number, and the tensor's name there."""
    base = state.base
    if base.weights_are_live:
        for published, live in layout.live.items():
            if live == name:
                return 0, base.weights, published
    handles = [base.rest, *([] if state.step is None else [state.step])]
    for number, handle in enumerate(handles, 1):
        if any(spec.name == name for spec in handle.tensors):
            return number, handle, name
    raise ValueError(f"tensor {name}: not in the state {base.rest.key}")
