"""The model of a row, and the names of rows that it is tried with."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from flexmarl.actors.names import PolicyName
from flexmarl.actors.sample_id import SampleId

REQUIRED = {"reward", "tokens"}
NAMES = [
    f"{query}_{turn}_{trajectory}"
    for query in ("q", "q_1", "10")
    for turn in (0, 1)
    for trajectory in (2, 10)
]
# Complete, more often than not.
SOME_NAMES = st.just({"reward", "tokens"}) | st.sets(st.sampled_from(["reward", "tokens", "note"]))
# Of the steps around the first that is open: that before it, it, the next.
SOME_IDS = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 0, 1, 1, 1, -1]), st.sampled_from(NAMES)),
    unique=True,
    min_size=1,
    max_size=6,
)
Ids = list[tuple[int, str]]
Keys = list[tuple[str, str]]  # agent and sample id


@dataclass(frozen=True)
class Ideal:
    """A row as it should be, by the records of the journal."""

    agent: str
    sample_id: str
    version: int
    position: int
    cells: dict[str, Any] = field(default_factory=dict)
    over: str | None = None

    @property
    def is_ready(self) -> bool:
        return self.over is None and self.cells.keys() >= REQUIRED

    @property
    def key(self) -> tuple[Any, ...]:
        sample = SampleId.parse(self.sample_id)
        return sample.step, self.position, sample.query, sample.trajectory, sample.turn, self.agent


Rows = dict[tuple[str, str], Ideal]  # in the order of arrival


Lease = tuple[PolicyName, Keys, float]  # and its deadline
