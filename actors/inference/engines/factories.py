"""The factory of each engine that a config can name."""

from ...messages import ModelConfig
from ..inference_config import EmbeddedEngineConfig, EngineConfig, SimulatedEngineConfig
from .engine_factory import EngineFactory


async def factory_of(model: ModelConfig | None, engine: EngineConfig) -> EngineFactory:
    """Reads the tokenizer and the config of ``model``. Raises OSError if they can't be read, UnsupportedModel."""
    if isinstance(engine, SimulatedEngineConfig):
        from .simulated_engine import SimulatedFactory

        return SimulatedFactory(engine)
    assert model is not None, "only a simulated policy has no model"
    # Imported here: an engine's library takes seconds to import, and may not be installed.
    match engine:
        case EmbeddedEngineConfig():
            from .embedded import EmbeddedFactory

            return await EmbeddedFactory.open(model, engine)
