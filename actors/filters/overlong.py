"""Filter of turns that ran to their greatest length."""

from typing import Annotated, Literal

from ..config_base import Count, Unit
from .group_filter import Exclusion, FilterOptions, FinishedGroup


class Overlong(FilterOptions):
    """Leaves out turns that are too long, whose reward says more about their length than about their content: overlong
    filtering (DAPO, Yu et al., arXiv 2503.14476, section 3.4). Their rewards still count in the advantages of the
    others, as in the paper, which masks their loss alone. Its soft punishment is ``sampling.overlong_buffer``."""

    name: Literal["overlong"] = "overlong"
    """Filter of a group's samples."""
    tokens: Annotated[Count, Unit("tokens")] | None = None
    """Most generated tokens of a turn that is kept. `null`: turns are left out that ended at their own greatest length
    (`sampling.max_new_tokens`, or less as the workflow asked)."""

    def judge(self, group: FinishedGroup) -> Exclusion | None:
        most = self.tokens
        samples = frozenset(
            turn.sample_id
            for turn in group.turns
            if (turn.truncated if most is None else len(turn.tokens) > most)
        )
        if not samples:
            return None
        limit = "ended at their greatest length" if most is None else f"have more than {most} tokens"
        return Exclusion(f"{len(samples)} turns {limit}", samples)
