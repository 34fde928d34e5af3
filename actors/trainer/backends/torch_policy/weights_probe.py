"""The probe of a version: what its weights give behind a few prompts, for instances to compare with."""

import random
from typing import Final

import torch

from ....messages import LikelyTokens
from ....names import PolicyName
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
    likeliest = completions.likeliest(
        rows.with_tensors(lambda tensor: tensor.to(completions.device)), LIKELIEST, models.gang
    ).cpu()
    if not torch.isfinite(likeliest).all():
        return ()
    return tuple(
        LikelyTokens(prompt, tuple(map(int, tokens)), tuple(logprobs))
        for prompt, (tokens, logprobs) in zip(prompts, likeliest.tolist(), strict=True)
    )
