"""The hardware that policies are trained on: one class for each kind of pool, chosen by ``name``."""

from typing import Annotated, Literal

from pydantic import Tag

from ...config_base import Config, Count, Positive, chosen_by_name
from .slot_choice import AllocatorConfig


class StaticPoolConfig(Config):
    """The trainer's own process holds all policies for ever, and computes for one after the other."""

    name: Literal["static"] = "static"


class SharedPoolConfig(AllocatorConfig):
    """``slots`` worker processes host the policies in turn: one is suspended when it has no work and another waits.
    Their number, and the rules by which they are shared (``AllocatorConfig``).

    ``slot_memory_gib``: the memory of a slot for one training state; a larger state is refused. None: as much as the
    machine has. ``host_memory_gib``: the memory for states that are suspended; those beyond it go to the run's folder
    on the disk. None: as much as the file system in memory has.
    """

    name: Literal["shared"] = "shared"
    slots: Count
    slot_memory_gib: Positive | None = None
    host_memory_gib: Positive | None = None


PoolConfig = Annotated[
    Annotated[StaticPoolConfig, Tag("static")] | Annotated[SharedPoolConfig, Tag("shared")],
    chosen_by_name("static"),
]
"""The section ``pool``."""
