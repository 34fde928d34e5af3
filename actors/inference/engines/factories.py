"""The factory of each engine that a config can name."""

import asyncio
from typing import TYPE_CHECKING

from ....core.collector import importing
from ...errors import EngineUnavailable
from ...messages import ModelConfig
from ..inference_config import (
    EmbeddedEngineConfig,
    EngineConfig,
    OpenaiEngineConfig,
    SimulatedEngineConfig,
    VllmEngineConfig,
)
from ..instance_setup import ServedBase
from .engine_factory import EngineFactory

if TYPE_CHECKING:
    from .embedded import EmbeddedFactory
    from .vllm_engine import VllmFactory


async def factory_of(
    model: ModelConfig | None, engine: EngineConfig, base: ServedBase | None = None
) -> EngineFactory:
    """Reads the tokenizer and the config of ``model``. Raises OSError if they can't be read, UnsupportedModel, and
    EngineUnavailable if the engine's library is missing or does not fit."""
    if isinstance(engine, SimulatedEngineConfig):
        from .simulated_engine import SimulatedFactory

        return SimulatedFactory(engine, base)
    if (problem := engine.unavailable("cpu" if model is None else model.device)) is not None:
        raise EngineUnavailable(engine.name, problem)
    if isinstance(engine, OpenaiEngineConfig):
        from .openai_engine import OpenaiFactory

        return OpenaiFactory(engine)
    assert model is not None, "only simulated policies and those of endpoints have no model"
    match engine:
        case EmbeddedEngineConfig():
            return await (await asyncio.to_thread(_import_embedded)).open(model, engine)
        case VllmEngineConfig():
            return await (await asyncio.to_thread(_vllm)).open(model, engine, base)


# Each library is imported by the processes alone that need it, in a thread: it takes seconds.


def _import_embedded() -> "type[EmbeddedFactory]":
    with importing():
        from .embedded import EmbeddedFactory

    return EmbeddedFactory


def _vllm() -> "type[VllmFactory]":
    with importing():
        from .vllm_engine import VllmFactory

    return VllmFactory
