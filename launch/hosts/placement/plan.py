"""The types of placement: an actor's needs, the plan, and its refusal."""

from dataclasses import dataclass
from typing import Final, Literal

from ....actors.errors import ConfigError
from ....core.base.texts import listing

Purpose = Literal["training", "generation"]
"""The two uses of a GPU. One actor of each may share a GPU if there are too few for all."""

SHARE_GPUS: Final = "hosts.share_gpus=true"
STATES: Final = "pool.states_per_slot"
BESIDE: Final = "states beside it"
"""The part of a slot for states beside the largest."""


@dataclass(frozen=True, slots=True)
class Need:
    """The resources that an actor needs. ``key``: the setting that decides about them, with its value.

    ``cores``: threads that compute; hosts may have fewer cores than their actors have threads. ``memory_bytes``: of the
    host, ``gpu_bytes``: of each GPU; 0 if they are not known. ``parts``: of the latter, or else of the former, by name.
    ``shared_bytes``: of the host's memory for published weights and for states of a shared pool, once they are placed.
    ``beside``: the actor on whose host it is placed, if that has room; it stands before this need.
    ``gpus``: GPUs of its own, all on its host. ``named``: instead, the numbers of GPUs of the head, which it may share
    with others. ``gang``: actors with the same number compute together, so they are on one host if they fit there.
    """

    actor: str
    key: str
    on_head: bool = False
    cores: int = 1
    memory_bytes: int = 0
    purpose: Purpose = "generation"
    gpus: int = 0
    gpu_bytes: int = 0
    named: tuple[int, ...] = ()
    gang: int | None = None
    parts: tuple[tuple[str, int], ...] = ()
    shared_bytes: int = 0
    beside: str = ""


@dataclass(frozen=True, slots=True)
class Placed:
    """An actor's place. ``gpus``: numbers of GPUs in its node's description. ``sees_all``: its process sees all GPUs of
    the node and chooses these by their numbers."""

    node: str
    need: Need
    gpus: tuple[int, ...] = ()

    @property
    def sees_all(self) -> bool:
        """True if the config names the GPUs by number: hidden ones would get other numbers in the process."""
        return bool(self.need.named)


@dataclass(frozen=True, slots=True)
class Plan:
    """The place of each actor, in the order of the needs. ``notes``: remarks for people, each a sentence."""

    actors: dict[str, Placed]
    notes: tuple[str, ...] = ()


class DoesNotFit(ConfigError):
    """The hosts have too little for the run; each problem has the numbers and the keys to change."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(f"the run does not fit the hosts:{listing(problems)}")
        self.problems = problems
