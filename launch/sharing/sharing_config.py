"""Settings of the sharing between runs."""

from typing import Annotated

from pydantic import Field

from ...actors.config_base import Config, Count, Natural, Positive, Share, Unit


class PeerConfig(Config):
    """Another run of the same task, whose finished groups this one trains too."""

    file: str
    """Address file of that run, which `flexmarl admit RUN FILE --may share` has written there; also one that is not
    there yet. The file is the permission to read: without one a run shares nothing."""
    weight: Positive = 1.0
    """Weight of its groups, beside those of other peers."""


class SharingConfig(Config):
    """Groups of other runs of the same task, as text, in the place of queries that a step would draw (SAPO, arXiv
    2509.08721): see [Sharing between runs](modes.md#sharing-between-runs)."""

    peers: Annotated[dict[str, PeerConfig], Field(default_factory=dict)]
    share: Share = 0.25
    """Most groups of peers in a step, as a share of `training.queries_per_step`. Unused places are kept for later
    steps, one group at most."""
    max_age: Annotated[Natural, Unit("steps")] = 8
    """Greatest age of a group that is trained: the steps that its own run, or this one, has made since then."""
    decay: Share = 0.8
    """Factor of a group's weight for each step of its age."""
    limit: Annotated[Count, Unit("groups")] = 256
    """Most groups that wait for a step. The oldest one makes room."""
