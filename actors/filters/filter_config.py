"""The setting ``rollout.filters``: the table of the filters that a config can name."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Discriminator, Tag

from ..config_base import each_label_once
from .contrast import Contrast
from .equal_rewards import EqualRewards
from .near_duplicate import NearDuplicate
from .overlong import Overlong
from .users_filter import UsersFilter


def _section(entry: Any) -> Any:
    """An entry as a section with a name: it may be a name alone, or have a function in its place."""
    if isinstance(entry, str):
        entry = {"function": entry} if ":" in entry else {"name": entry}
    return {"name": "function", **entry} if isinstance(entry, dict) and "function" in entry else entry


def _name_of(entry: Any) -> Any:
    return entry.get("name") if isinstance(entry, dict) else getattr(entry, "name", None)


FilterConfig = Annotated[
    Annotated[EqualRewards, Tag("equal_rewards")]
    | Annotated[Overlong, Tag("overlong")]
    | Annotated[NearDuplicate, Tag("near_duplicate")]
    | Annotated[Contrast, Tag("contrast")]
    | Annotated[UsersFilter, Tag("function")],
    Discriminator(_name_of),
    BeforeValidator(_section),
]
"""An entry of ``rollout.filters``."""


FilterConfigs = Annotated[tuple[FilterConfig, ...], AfterValidator(each_label_once)]
