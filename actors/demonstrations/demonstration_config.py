"""The section ``rollout.demonstrations``: the table of the rules of patches that a config can name."""

from typing import Annotated, Any

from pydantic import Discriminator, Tag

from .chance import ChanceRule
from .threshold import ThresholdRule


def _patch_of(section: Any) -> Any:
    return section.get("patch", "threshold") if isinstance(section, dict) else getattr(section, "patch", None)


DemonstrationConfig = Annotated[
    Annotated[ThresholdRule, Tag("threshold")] | Annotated[ChanceRule, Tag("chance")],
    Discriminator(_patch_of),
]
"""The section ``rollout.demonstrations``."""
