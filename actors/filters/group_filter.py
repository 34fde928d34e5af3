"""Filters of groups: each looks at a group that has ended, and leaves samples out that are not worth training.

    trajectories end ─> credit assignment ─> filter ─> filter ... ─> the samples that are left go to the store
                                                │
                                                └─ Exclusion: samples and a reason

A filter is one file beside this one, with one class, and one row of ``filter_config.py``. The package belongs to no
role: rollout workers ask the filters when a group closes. A filter is pure: the same group
has the same result, so that a run that is resumed leaves out what it would have left out, and no filter has a state to
be saved. A group that loses all of its samples is dropped, and another query may take its place.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ..config_base import Config
from ..messages import Query
from ..names import AgentName

if TYPE_CHECKING:
    from ..recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """A turn that would be trained. ``trajectory``: its number within the group. ``truncated``: it ended at the
    greatest number of tokens. ``reward``: the sample's, and ``advantage``: by the workflow's rewards, before any
    punishment of length."""

    sample_id: str
    agent: AgentName
    trajectory: int
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    truncated: bool
    reward: float
    advantage: float


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """The trajectories of a query that count. ``turns``: those that earlier filters have not left out, in order of
    their ids. ``rewards``: by agent, one for each trajectory that gives it one, before any punishment of length.
    ``metrics``: the workflow's own, by name."""

    query: Query
    turns: tuple[FinishedTurn, ...]
    rewards: Mapping[AgentName, Sequence[float]]
    metrics: Mapping[str, Sequence[float]]

    def without(self, sample_ids: Collection[str]) -> "FinishedGroup":
        """The same without the turns that have these ids."""
        return replace(self, turns=tuple(turn for turn in self.turns if turn.sample_id not in sample_ids))


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Samples that are not trained, and the reason in words. ``sample_ids``: None for all of the group."""

    reason: str
    sample_ids: frozenset[str] | None = None


Judge = Callable[[FinishedGroup], Exclusion | None]
"""Pure. Returns None if the group is kept as it is."""


class FilterOptions(Config):
    """A filter with its settings; the ``name`` in the config chooses the class.

    ``compares``: it leaves samples out that only an estimator that compares rewards learns nothing from.
    """

    compares: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """Its name in figures and messages."""
        return str(getattr(self, "name"))  # noqa: B009  # of the classes in the other files

    def judge(self, group: FinishedGroup) -> Exclusion | None:
        """Returns None if the group is kept as it is. The group has one turn at least."""
        raise NotImplementedError

    def load(self, recipe: "Recipe") -> Judge:
        """The function that judges groups. Raises RecipeError if it is a user's that can't be loaded."""
        return self.judge


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """A filter that is loaded. ``label``: its name in figures."""

    label: str
    judge: Judge


def apply_filters(
    group: FinishedGroup, filters: Sequence[GroupFilter]
) -> tuple[FinishedGroup, dict[str, dict[AgentName, int]], list[str]]:
    """Returns the rest of the group behind all filters; by filter and agent the number of samples that it left out; and
    the reasons. A filter that has left out nothing is in neither."""
    counts: dict[str, dict[AgentName, int]] = {}
    reasons: list[str] = []
    for group_filter in filters:
        if not group.turns or (exclusion := group_filter.judge(group)) is None:
            continue
        ids = {turn.sample_id for turn in group.turns}
        removed = ids if exclusion.sample_ids is None else ids & exclusion.sample_ids
        if not removed:
            continue
        by_agent = counts.setdefault(group_filter.label, {})
        for turn in group.turns:
            if turn.sample_id in removed:
                by_agent[turn.agent] = by_agent.get(turn.agent, 0) + 1
        reasons.append(exclusion.reason)
        group = group.without(removed)
    return group, counts, reasons
