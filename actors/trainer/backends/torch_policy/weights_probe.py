"""The probe of a version: what its weights give behind a few prompts, for instances to compare with."""

import random
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from ....errors import UnsupportedModel
from ....expert_routes import Routes, SentRoutes
from ....messages import LikelyTokens
from ....names import PolicyName
from ....routers import RouteRecorder, recorder_of
from ...padding import pack_rows, pad_rows
from .trained_models import TrainedModels

PROMPTS: Final = 8
PROMPT_TOKENS: Final = 8
LIKELIEST: Final = 8


def draw_prompts(name: PolicyName, version: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Prompts of random tokens, others for each version: a single embedding that is wrong shows up at some time. All
    ranks draw the same."""
    # A text as seed, not a hash of it: that differs from process to process.
    numbers = random.Random(f"probe of {name} {version}")
    return [tuple(numbers.randrange(vocab_size) for _ in range(PROMPT_TOKENS)) for _ in range(PROMPTS)]


def weights_probe(models: TrainedModels, name: PolicyName, version: int) -> tuple[LikelyTokens, ...]:
    """One forward, of ``PROMPTS * PROMPT_TOKENS`` tokens, on every rank; empty if a log-probability is not finite."""
    completions = models.completions
    prompts = draw_prompts(name, version, completions.vocab_size)
    lay_out = pack_rows if models.packs else pad_rows
    rows = lay_out([(prompt, (0,)) for prompt in prompts], completions.vocab_size)
    recorder = recorder_of(completions.model)
    try:
        likeliest = completions.likeliest(
            rows.with_tensors(lambda tensor: tensor.to(completions.device)), LIKELIEST, models.gang
        ).cpu()
        routes = _routes(recorder)
    finally:
        if recorder is not None:
            recorder.remove()
    if not torch.isfinite(likeliest).all():
        return ()
    return tuple(
        LikelyTokens(prompt, tuple(map(int, tokens)), tuple(logprobs), SentRoutes.of(experts))
        for prompt, (tokens, logprobs), experts in zip(prompts, likeliest.tolist(), routes, strict=True)
    )


def _routes(recorder: RouteRecorder | None) -> Sequence[Routes | None]:
    """The routes of each prompt, after the forward."""
    unknown = [None] * PROMPTS
    if recorder is None:
        return unknown
    try:
        routes = recorder.take().cpu().numpy()
    except UnsupportedModel:  # it is trained all the same, unless it is to replay routes
        return unknown
    return np.split(routes, PROMPTS)  # all prompts are as long, in their order
