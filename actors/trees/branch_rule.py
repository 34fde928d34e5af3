"""Rules of tree rollouts: the width of a branch point, and the lines of play that stay.

    a line asks its agents ─> width(()) candidates of the same prompt ─> width(seen), until it asks for no more
                                                                             │
                          lines that stay <─ kept(candidates) <─ a copy of the environment takes each candidate

A rule is one file beside this one, with one class, and one row of ``tree_config.py``. A rule is pure: the same
candidates have the same result, so that a trajectory that begins again after a loss is the same tree, and no rule has a
state to be saved. A rule that needs the history of the run predicts by a ``SuccessModel``: it comes with the plan of
the step, all trees of a step have the same one, and it is a part of the run's checkpoints. The package belongs to no
role: environments play trees, rollout workers reward them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from ..config_base import Config, Count, Unit
from ..workflow import Rewards


@dataclass(frozen=True, slots=True)
class Candidate:
    """A round of a line: the turns of the agents that were asked together.

    ``logprobs``: of the drawn tokens of all of these turns. ``past``: the confidences of the earlier rounds of its
    line, the oldest first. ``reward``: of its turns; 0 before the environment has taken them, and for a rule that does
    not ask for rewards. ``success``: the predicted chance that a line from its prompts on succeeds, and ``price``: of a
    candidate, both as the ``SuccessModel`` has them, for a rule that predicts."""

    logprobs: tuple[float, ...]
    past: tuple[float, ...] = ()
    reward: float = 0.0
    success: float = 0.5
    price: float = 1.0

    @property
    def confidence(self) -> float:
        """The geometric mean of the probabilities of its tokens, 0 to 1; 1 without a token."""
        return math.exp(-self.surprise)

    @property
    def surprise(self) -> float:
        """The mean of ``-log p`` over its tokens: one draw's estimate of their entropy, in nats; 0 without a token."""
        return -math.fsum(self.logprobs) / len(self.logprobs) if self.logprobs else 0.0


class BranchRule(Config):
    """A rule with its settings; the key ``branch`` chooses the class.

    ``compares_rewards``: it chooses by the rewards of a round, and the candidates that it cuts are trained with these.
    Else the turns that no line to an end holds are not trained. ``predicts``: it branches by the predicted success of
    prefixes, and the predictor learns from its trees."""

    compares_rewards: ClassVar[bool]
    predicts: ClassVar[bool] = False

    width: Annotated[Count, Unit("turns")] = 4
    """Most candidates of one prompt."""

    @property
    def most_lines(self) -> int:
        """The most lines of a tree that are played at once."""
        return self.width

    def candidates(self, seen: Sequence[Candidate], room: int) -> int:
        """Returns the candidates that a branch point should have, 1 at least. ``seen``: those that are there; called
        again when there are more, until the result is no greater than their number. ``room``: the lines that may still
        be added to the tree. By default one is drawn, and ``count`` decides by it."""
        return self.count(seen[0], min(self.width, 1 + room)) if len(seen) == 1 else max(1, len(seen))

    def count(self, first: Candidate, most: int) -> int:
        """Returns the candidates of a branch point whose first one is there, 1 to ``most``."""
        raise NotImplementedError

    def kept(self, candidates: Sequence[Candidate]) -> list[int]:
        """Returns the places of the candidates whose lines stay, in order, one at least. ``candidates``: of one branch
        point, or the only one of a point without a choice."""
        raise NotImplementedError

    def success_of(self, rewards: Rewards) -> float:
        """Returns the success of a line with these ``rewards``, 0 to 1. For a rule that ``predicts``."""
        raise NotImplementedError

    def excess(self, lines: int) -> float | None:
        """Returns the share of its budget by which a tree of ``lines`` is above it, -1 to infinity; None for a rule
        without a budget over the trees of a step."""
        return None


@dataclass(frozen=True, slots=True)
class TreePlace:
    """A turn's place in a tree. ``node``: the last branch point of its line, at it or before it; -1: there is none.
    ``ordinal``: the number of the turn among its agent's turns from there on, on its line. The turns of an agent with
    the same node and the ordinal 0 answer the same prompt, if the agent was asked at the branch point."""

    node: int
    ordinal: int
