"""The text of a sample's id, ``{step}:{query}_{turn}_{trajectory}``: unique over the run, also if a query comes again.

``{step}:{query}`` names the group, ``{step}:{query}_{trajectory}`` the trajectory. The samples of a trajectory may lie
in the tables of several agents. A turn of an evaluation has ``eval`` in place of the step; it never reaches the store.
"""

import re
from typing import Final, NamedTuple

from .errors import StoreError

SAMPLE_ID_FORM: Final = "{step}:{query}_{turn}_{trajectory}"
TRAJECTORY_FORM: Final = "{step}:{query}_{trajectory}"

_EVALUATION: Final = "eval"
# One spelling for each number, of 64 bits at most: parsed and formatted again, a text is the same. The query may hold
# anything, the separators too: the step ends at the first colon, turn and trajectory are the last two numbers.
_NUMBER: Final = r"(0|[1-9][0-9]{0,17})"
_SCOPE: Final = r"(eval|0|[1-9][0-9]{0,17})"
_SAMPLE_ID: Final = re.compile(rf"{_SCOPE}:(.*)_{_NUMBER}_{_NUMBER}", re.DOTALL)
_TRAJECTORY: Final = re.compile(rf"{_SCOPE}:(.*)_{_NUMBER}", re.DOTALL)


class TrajectoryName(NamedTuple):
    """``{step}:{query}_{trajectory}``. ``step``: None for an evaluation. Numbers: 0 ... 10^18 - 1."""

    step: int | None
    query: str
    trajectory: int

    def __str__(self) -> str:
        return f"{_scope(self.step)}:{self.query}_{self.trajectory}"

    @classmethod
    def parse(cls, text: str) -> "TrajectoryName":
        """Raises StoreError if ``text`` is not a trajectory's name."""
        match = _TRAJECTORY.fullmatch(text)
        if match is None:
            raise StoreError(f"{text!r} is not a trajectory's name: {TRAJECTORY_FORM}")
        scope, query, trajectory = match.groups()
        return cls(_step(scope), query, int(trajectory))


class SampleId(NamedTuple):
    """``{step}:{query}_{turn}_{trajectory}``. ``step``: None for an evaluation. Numbers: 0 ... 10^18 - 1.

    ``turn`` counts the trajectory's turns over all agents.
    """

    step: int | None
    query: str
    turn: int
    trajectory: int

    def __str__(self) -> str:
        return f"{self.group}_{self.turn}_{self.trajectory}"

    @property
    def group(self) -> str:
        """The name of the group that the sample was generated in."""
        return f"{_scope(self.step)}:{self.query}"

    @property
    def trajectory_name(self) -> TrajectoryName:
        """The name of its trajectory: equal for all turns of it, of any agent."""
        return TrajectoryName(self.step, self.query, self.trajectory)

    @classmethod
    def parse(cls, text: str) -> "SampleId":
        """Raises StoreError if ``text`` is not a sample id."""
        match = _SAMPLE_ID.fullmatch(text)
        if match is None:
            raise StoreError(f"{text!r} is not a sample id: {SAMPLE_ID_FORM}")
        scope, query, turn, trajectory = match.groups()
        return cls(_step(scope), query, int(turn), int(trajectory))


def training_step(text: str) -> int | None:
    """The step of a sample of training; None if ``text`` is not the id of one. Half the time of ``SampleId.parse``."""
    match = _SAMPLE_ID.fullmatch(text)
    return None if match is None or match[1] == _EVALUATION else int(match[1])


def step_of(sample_id: str) -> int:
    """The step in an id that ``training_step`` has passed before; half of its time."""
    return int(sample_id[: sample_id.index(":")])


def turn_of(sample_id: str) -> int:
    """The turn in a sample's id, which is valid; a quarter of the time of ``SampleId.parse``."""
    return int(sample_id.rsplit("_", 2)[1])


def _scope(step: int | None) -> str:
    return _EVALUATION if step is None else str(step)


def _step(scope: str) -> int | None:
    return None if scope == _EVALUATION else int(scope)
