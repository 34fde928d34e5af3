"""The section ``replay``: the table of the replays that a config can name."""

from typing import Annotated, Literal

from pydantic import Tag

from ...config_base import Config, chosen_by_name
from .recent_replay import RecentReplayConfig
from .success_replay import SuccessReplayConfig


class NoReplayConfig(Config):
    """Each trajectory is trained once."""

    name: Literal["none"] = "none"
    """Trajectories that come again, for `mode=async`. `none`; `recent`: the newest groups whose rewards differ;
    `successes`: those with the rarest successes. See [Replay](modes.md#replay)."""


ReplayConfig = Annotated[
    Annotated[NoReplayConfig, Tag("none")]
    | Annotated[RecentReplayConfig, Tag("recent")]
    | Annotated[SuccessReplayConfig, Tag("successes")],
    chosen_by_name("none"),
]
"""The section ``replay``."""
