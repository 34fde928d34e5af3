"""From tokens to logits: the interface that the engine needs of a model, and its form for every architecture."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ....routers import RouteRecorder
from .decode_plan import DecodeStep
from .prompt_batch import PromptBatch
from .slot_cache import ATTENTION, SlotCache


class Forward(ABC):
    """Computes logits, and stores keys and values in a ``SlotCache`` whose next rows are set."""

    @abstractmethod
    def prefill(self, cache: SlotCache, batch: PromptBatch) -> Tensor:
        """Logits [n, vocabulary] behind the last token of each part of a prompt."""

    @abstractmethod
    def decode(self, cache: SlotCache, inputs: Tensor, step: DecodeStep) -> Tensor:
        """Logits [n, vocabulary] behind ``inputs``, int64 [n, 1], the newest token of each row."""

    def weights_loaded(self) -> None:  # noqa: B027  # most forwards compute with the model's own tensors
        """Takes over new weights: called when the model's tensors have been overwritten."""


class ModuleForward(Forward):
    """The model's own ``forward``. Replaces its attention implementation. ``recorder``: of its routes, which go into
    the cache; None if they are not wanted."""

    def __init__(self, model: PreTrainedModel, recorder: RouteRecorder | None = None) -> None:
        self._model: Any = model  # Any: much of transformers' interface is untyped
        self._recorder = recorder
        self._model.set_attn_implementation(ATTENTION)
        self._head: nn.Module = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]  # transformers

    def prefill(self, cache: SlotCache, batch: PromptBatch) -> Tensor:
        # Causal attention keeps the padding behind a prompt from reaching it. Only the last token's logits are needed;
        # its hidden state is selected before the output matrix, at another position in each row.
        last = torch.arange(len(batch.tokens), device=batch.tokens.device), batch.lengths - 1
        with self._head.register_forward_pre_hook(lambda _, args: (args[0][last].unsqueeze(1),)):
            return self._logits(cache, batch.tokens, batch.mask, batch.positions)

    def decode(self, cache: SlotCache, inputs: Tensor, step: DecodeStep) -> Tensor:
        cache.write_to(step.cells)
        return self._logits(cache, inputs, step.mask, step.positions)

    def _logits(
        self, cache: SlotCache, inputs: Tensor, mask: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        output = self._model(
            input_ids=inputs,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        if self._recorder is not None:
            cache.store_routes(self._recorder.take())
        logits: Tensor = output.logits
        return logits[:, 0]
