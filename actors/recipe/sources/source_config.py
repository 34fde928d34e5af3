"""The section ``query_source``: the table of the sources that a config can name."""

from typing import Annotated

from pydantic import Tag

from ...config_base import chosen_by_name
from .band_source import BandConfig
from .plain_source import PlainSourceConfig
from .rare_success_source import RareSuccessConfig
from .replay_source import ReplayConfig
from .variance_source import VarianceConfig

SourceConfig = Annotated[
    Annotated[PlainSourceConfig, Tag("recipe")]
    | Annotated[ReplayConfig, Tag("replay")]
    | Annotated[VarianceConfig, Tag("variance")]
    | Annotated[RareSuccessConfig, Tag("rare_success")]
    | Annotated[BandConfig, Tag("band")],
    chosen_by_name("recipe"),
]
"""The section ``query_source``."""
