"""The section ``rollout.tree``: the table of the rules that a config can name."""

from typing import Annotated, Any

from pydantic import Discriminator, Tag

from .entropy import EntropyRule
from .greedy import GreedyRule
from .predicted import PredictedRule


def _branch_of(section: Any) -> Any:
    return section.get("branch", "greedy") if isinstance(section, dict) else getattr(section, "branch", None)


TreeConfig = Annotated[
    Annotated[GreedyRule, Tag("greedy")]
    | Annotated[EntropyRule, Tag("entropy")]
    | Annotated[PredictedRule, Tag("predicted")],
    Discriminator(_branch_of),
]
"""The section ``rollout.tree``."""
