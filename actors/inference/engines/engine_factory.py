"""The parts that an instance serves a policy with, the same for every engine."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

from ...chat.text_codec import TextCodec
from ...messages import ModelConfig
from ..instance_setup import ServedBase
from .engine import Engine


class EngineFactory(ABC):
    """Builds the engine of one policy. ``codec``: of the policy's tokenizer.

    ``architecture``: anything that compares by ``==``. Policies whose architectures are equal can be served in turn by
    one engine, which only loads their weights.
    """

    codec: TextCodec
    architecture: object
    clock: Callable[[], float] = staticmethod(time.perf_counter)
    """Seconds; the times of an instance are measured by it."""

    @classmethod
    @abstractmethod
    async def open(cls, model: ModelConfig | None, options: Any, base: ServedBase | None) -> Self:
        """The factory of a policy with ``model`` and ``options``, a section ``engine`` of this engine. ``base``: of a
        policy that is served as an adapter over ``model``. Raises OSError if the tokenizer or the model's config can't
        be read, UnsupportedModel."""

    @abstractmethod
    async def build(self) -> Engine:
        """An engine without weights. Raises UnsupportedModel, and the errors of the engine's library."""
