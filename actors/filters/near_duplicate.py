"""Filter of answers that nearly repeat another answer to the same prompt."""

from typing import Annotated, Literal

from ..config_base import Count, Share, Unit
from ..names import AgentName
from .group_filter import Exclusion, FilterOptions, FinishedGroup

Shingles = frozenset[tuple[int, ...]]


class NearDuplicate(FilterOptions):
    """Leaves out answers whose tokens are nearly those of an earlier answer to the same prompt with the same advantage.

    Two answers are compared by the sets of their ``shingle`` tokens in a row: the share of the union that both have
    (Jaccard; shingles after Broder, "On the resemblance and containment of documents", 1997). Answers that
    differ in their advantage are both kept: the difference is what is learned.
    """

    name: Literal["near_duplicate"] = "near_duplicate"
    """Filter of a group's samples."""
    similarity: Share = 0.9
    """Least share of the runs of tokens that two answers have in common if one is left out. 1: answers with the same
    runs alone."""
    shingle: Annotated[Count, Unit("tokens")] = 3
    """Length of a run of tokens."""

    def judge(self, group: FinishedGroup) -> Exclusion | None:
        distinct: dict[tuple[AgentName, tuple[int, ...], float], list[Shingles]] = {}
        samples: set[str] = set()
        # By number of the trajectory, not by arrival: the answer that stays is the same in every run.
        for turn in sorted(group.turns, key=lambda turn: turn.trajectory):
            shingles = _shingles(turn.tokens, self.shingle)
            answers = distinct.setdefault((turn.agent, turn.prompt_tokens, turn.advantage), [])
            if any(_alike(shingles, answer, self.similarity) for answer in answers):
                samples.add(turn.sample_id)
            else:
                answers.append(shingles)
        if not samples:
            return None
        return Exclusion(
            f"{len(samples)} answers nearly repeat another one of their group", frozenset(samples)
        )


def _shingles(tokens: tuple[int, ...], length: int) -> Shingles:
    """All runs of ``length`` tokens; the whole answer if it is shorter."""
    return frozenset(tokens[start : start + length] for start in range(max(1, len(tokens) - length + 1)))


def _alike(first: Shingles, second: Shingles, similarity: float) -> bool:
    smaller, larger = sorted((len(first), len(second)))
    # The sizes alone bound the share from above: most pairs need no intersection.
    if smaller < similarity * larger:
        return False
    common = len(first & second)
    return common >= similarity * (len(first) + len(second) - common)
