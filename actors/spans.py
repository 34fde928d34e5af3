"""Spans of a run: what each of its parts did, from when to when, for a timeline.

    Span          one of them, as the actors record it, the run's folder keeps it and the timeline shows it
    KINDS         every kind, and the part of the run that it belongs to
    record        hands one to the recorder of the process

Spans of a query (its trajectories, turns and samples) are recorded for a share of all queries, the same one in each
process; all others always. Times are the wall clock of each host: between hosts they differ as these clocks do.

The flow of a sample through the run follows from the attributes:

    trajectory -> turn          query, step, trajectory
    turn -> prefill, decode, generate, wait     query, step, trajectory, turn
    turn -> sample              query, step, trajectory, turn
    sample -> micro_batch       policy, micro_batch
    micro_batch -> optimizer    policy, and the version before the step
    optimizer -> step           step
    optimizer -> publish        policy, version
    publish -> install          policy, version
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from ..core.spans import SpanRecorder

KINDS: Final = {
    # kind: the part of the run
    "trajectory": "rollout",
    "turn": "rollout",
    "wait": "rollout",  # of a turn, for an instance that serves its version
    "environment": "rollout",  # the time of a trajectory in which it has no turn
    "generate": "instance",  # of an engine that can't tell its two parts apart
    "prefill": "instance",  # from the begin of a turn's prompt to its first token
    "decode": "instance",
    "install": "instance",
    "load": "instance",
    "lease": "store",
    "sample": "slot",  # in its micro-batch
    "micro_batch": "slot",
    "optimizer": "slot",
    "sft": "slot",
    "publish": "slot",
    "build": "slot",
    "save": "slot",
    "resume": "slot",
    "suspend": "slot",
    "copy": "slot",  # of the state that an optimizer step has changed, to the host's memory
    "step": "orchestrator",
    "evaluation": "orchestrator",
    "checkpoint": "orchestrator",
    "move": "router",
    "versions": "router",  # from the publication of a version until all its instances have it
}
GENERATING: Final = ("generate", "prefill", "decode")
"""The kinds of an engine's work for a turn."""
OF_QUERIES: Final = frozenset({"trajectory", "turn", "wait", "environment", *GENERATING, "sample"})
"""The kinds of which a share is recorded, by query."""
_LOW_BITS: Final = 2**31 - 1


class Span(NamedTuple):
    """``begin``, ``end``: seconds since 1970. ``lane``: of the timeline. Empty and -1: it has no such attribute.
    ``step``: of the run; -1 for an evaluation's. ``version``: of the policy, the one that the span has brought about or
    has computed with. ``micro_batch``: see ``batch_number``."""

    lane: str
    kind: str
    begin: float
    end: float
    query: str = ""
    agent: str = ""
    policy: str = ""
    note: str = ""
    trajectory: int = -1
    turn: int = -1
    version: int = -1
    step: int = -1
    micro_batch: int = -1
    tokens: int = -1


OF_LABEL: Final = ("lane", "kind", "agent", "policy", "note")
OF_NAME: Final = "query"
NUMBERS: Final = ("trajectory", "turn", "version", "step", "micro_batch", "tokens")
"""The attributes in the order in which ``core/spans.py`` takes them: label, name and numbers."""
NAMES: Final = ("lane", "kind", "query", "agent", "policy", "note")
"""In the order of ``Span``."""


def record(
    spans: SpanRecorder,
    lane: str,
    kind: str,
    begin: float,
    end: float,
    query: str = "",
    agent: str = "",
    policy: str = "",
    note: str = "",
    trajectory: int = -1,
    turn: int = -1,
    version: int = -1,
    step: int = -1,
    micro_batch: int = -1,
    tokens: int = -1,
) -> None:
    """Records a ``Span`` with these attributes, if its query is among those whose spans are kept. ``begin``, ``end``:
    by ``spans.now``."""
    # Not a Span: there are thousands in a second, and the objects would cost a third of their recording.
    spans.add(
        begin,
        end,
        (lane, kind, agent, policy, note),
        query,
        trajectory,
        turn,
        version,
        step,
        micro_batch,
        tokens,
        key=query if kind in OF_QUERIES else "",
    )


def batch_number(fence: int) -> int:
    """The attribute ``micro_batch`` of the rows under a fence: its low bits, which are enough to tell two apart."""
    return fence & _LOW_BITS


def place_of(sample_id: str) -> tuple[int, str, int, int]:
    """Step, query, turn and trajectory of a sample by its id; -1 for the step of an evaluation. An id that is not of a
    run is a query."""
    # Without the checks of ``SampleId.parse``, which take three times as long.
    try:
        group, turn, trajectory = sample_id.rsplit("_", 2)
        step, colon, query = group.partition(":")
        if colon:
            return (-1 if step == "eval" else int(step)), query, int(turn), int(trajectory)
    except ValueError:
        pass
    return -1, sample_id, -1, -1


@contextmanager
def record_time(
    spans: SpanRecorder, lane: str, kind: str, *, policy: str = "", version: int = -1, step: int = -1
) -> Iterator[None]:
    """Records the time of the block as a span, if the block does not raise."""
    begin = spans.now()
    yield
    record(spans, lane, kind, begin, spans.now(), policy=policy, version=version, step=step)
