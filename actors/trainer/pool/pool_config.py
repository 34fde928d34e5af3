"""The hardware that policies are trained on: one class for each kind of pool, chosen by ``name``."""

from typing import Annotated, Literal

from pydantic import Tag

from ...config_base import AutoCount, Config, Positive, Unit, chosen_by_name
from .slot_choice import AllocatorConfig


class StaticPoolConfig(Config):
    """The trainer's own process holds all policies for ever, and computes for one after the other."""

    name: Literal["static"] = "static"
    """`static`: the trainer's process holds all policies; `shared`: they take turns on slot workers."""


class SharedPoolConfig(AllocatorConfig):
    """Worker processes that host the policies in turn: one is suspended when it has no work and another waits. Their
    number, and the rules by which they are shared (``AllocatorConfig``)."""

    name: Literal["shared"] = "shared"
    slots: Annotated[AutoCount, Unit("slots")]
    """Slot workers, a process each: `slot-0`, `slot-1` and so on. `auto`: as many as the policy with the most ranks
    has."""
    slot_memory_gib: Annotated[Positive, Unit("GiB")] | None = None
    """Memory of a slot for one training state. A larger state is refused. `null`: as much as the machine has."""
    host_memory_gib: Annotated[Positive, Unit("GiB")] | None = None
    """Memory of each host for states of suspended policies. Those beyond it go to the disk, in the run's folder.
    `null`: as much as the file system in memory has."""

    @property
    def slot_count(self) -> int:
        """``slots``, once the plan has chosen them."""
        assert isinstance(self.slots, int), "slots=auto is replaced before a run starts"
        return self.slots


PoolConfig = Annotated[
    Annotated[StaticPoolConfig, Tag("static")] | Annotated[SharedPoolConfig, Tag("shared")],
    chosen_by_name("static"),
]
"""The section ``pool``."""
