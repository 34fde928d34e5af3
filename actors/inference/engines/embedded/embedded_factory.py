"""The embedded engine of a policy: ``TransformersEngine``, whose steps run in a thread of their own."""

from ....pretrained import empty_model
from ...inference_config import EmbeddedEngineConfig
from ..hugging_face_factory import HuggingFaceFactory
from ..step_engine import StepEngine
from .huggingface import TransformersEngine


class EmbeddedFactory(HuggingFaceFactory[EmbeddedEngineConfig]):
    """Serves a Hugging Face causal language model."""

    def _build(self) -> StepEngine:
        model = empty_model(self._model)
        options = self._options
        return TransformersEngine(
            model,
            self._end_tokens(model),
            max_batch=options.max_batch,
            max_context=options.max_context,
            prefill_chunk=options.prefill_chunk,
            kv_cache_bytes=options.kv_cache_bytes,
            prefix_reuse=options.prefix_reuse,
            quantized=options.quantizes,
            records_routes=self._model.router_replay,
        )
