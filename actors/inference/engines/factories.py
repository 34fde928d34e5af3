"""The factory of the engine that a config names.

An engine is a file beside this one, and a class of ``inference_config.py`` that names it: nothing else knows the
engines.
"""

import asyncio
import importlib

from ....core.base.collector import importing
from ...errors import EngineUnavailable
from ...messages import ModelConfig
from ..inference_config import EngineConfig
from ..instance_setup import ServedBase
from .engine_factory import EngineFactory


async def factory_of(
    model: ModelConfig | None, engine: EngineConfig, base: ServedBase | None = None
) -> EngineFactory:
    """Reads the tokenizer and the config of ``model``. Raises OSError if they can't be read, UnsupportedModel, and
    EngineUnavailable if the engine's library is missing or does not fit."""
    if (problem := engine.unavailable("cpu" if model is None else model.device)) is not None:
        raise EngineUnavailable(engine.name, problem)
    if engine.imports_library:  # in a thread: it takes seconds
        factory = await asyncio.to_thread(_import_with_library, engine.factory)
    else:
        factory = _import_factory(engine.factory)
    return await factory.open(model, engine, base)


def _import_with_library(name: str) -> type[EngineFactory]:
    with importing():
        return _import_factory(name)


def _import_factory(name: str) -> type[EngineFactory]:
    module, _, class_name = name.partition(":")
    factory: type[EngineFactory] = getattr(importlib.import_module(f".{module}", __package__), class_name)
    return factory
