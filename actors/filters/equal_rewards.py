"""Filter of agents whose rewards in a group are all equal: dynamic sampling."""

from typing import ClassVar, Literal

from .group_filter import Exclusion, FilterOptions, FinishedGroup


class EqualRewards(FilterOptions):
    """Leaves out the samples of agents of which no turn has an advantage, by the workflow's rewards before any
    punishment of length (DAPO, Yu et al., arXiv 2503.14476, section 3.2, eq. 11: groups of right and wrong answers, of
    any length)."""

    compares: ClassVar[bool] = True

    name: Literal["equal_rewards"] = "equal_rewards"
    """Filter of a group's samples: see [Group filters](modes.md#group-filters)."""

    def judge(self, group: FinishedGroup) -> Exclusion | None:
        taught = {turn.agent for turn in group.turns if turn.advantage}
        agents = [agent for agent in dict.fromkeys(turn.agent for turn in group.turns) if agent not in taught]
        if not agents:
            return None
        samples = frozenset(turn.sample_id for turn in group.turns if turn.agent not in taught)
        return Exclusion(f"all rewards are equal: {', '.join(agents)}", samples)
