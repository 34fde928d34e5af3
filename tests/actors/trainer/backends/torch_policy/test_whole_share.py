"""The largest share of a model that one rank ever has in memory beyond its own rows."""

import math
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from flexmarl.actors.trainer.backends.torch_policy.gang_rank import GangRank
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.padding import pad_rows
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from scripts.bench.gathered_weights import GatheredWeights
from scripts.bench.memory_peaks import peak_bytes

from .ranks import Ranks, gang_setup, made_policy

MOST = 0.15
"""The share of the model. FSDP2 has about three layers at a time, one gathered, copied, and not yet freed."""


def deep_setup(dtype: str) -> PolicySetup:
    """Many equal layers, of which activations are small beside the parameters: each has 3 % of them."""
    return gang_setup(
        {"name": "dapo"},
        dtype=dtype,
        trainer={"name": "torch", "activation_checkpointing": True},
        num_hidden_layers=32,
        intermediate_size=512,
    )


def parameters(policy: TorchPolicy) -> int:
    """Elements of the whole model."""
    return sum(math.prod(part.shape) for name, part in policy.parts().items() if name.startswith("model/"))


def forward_peak(gang: GangRank, setup: PolicySetup) -> tuple[int, int]:
    """Bytes that a forward takes at most, with all that is kept for the backward; and the parameters."""
    policy = made_policy(gang, setup, None)
    completions, rows = policy.models.completions, pad_rows([((1, 2, 3), (4, 5))], 18)
    torch.autograd.backward(completions.logprobs(rows).sum())  # what FSDP2 allocates once
    return peak_bytes(lambda: completions.logprobs(rows)), parameters(policy)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_forward_with_checkpointed_layers_has_few_layers_whole_at_a_time(ranks: Ranks, size: int) -> None:
    for peak, count in ranks.run(size, forward_peak, deep_setup("bfloat16")):
        assert peak <= MOST * count * 2, "in bfloat16"


def gathered_share(gang: GangRank, *, keeps_layers: bool) -> float:
    """The weights that were gathered at a time in a forward and its backward, as a share of all."""
    policy = made_policy(gang, deep_setup("bfloat16"), None)
    completions, rows = policy.models.completions, pad_rows([((1, 2, 3), (4, 5))], 18)
    for module in completions._forward.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(not keeps_layers)
    gathered = GatheredWeights(completions._forward)
    with gathered.counted():
        torch.autograd.backward(completions.logprobs(rows).sum())
    return gathered.most / parameters(policy)


def test_a_backward_has_few_layers_whole_at_a_time(ranks: Ranks) -> None:
    assert max(ranks.run(2, partial(gathered_share, keeps_layers=False))) <= MOST
    assert min(ranks.run(2, partial(gathered_share, keeps_layers=True))) > 0.9, "what the figure is for"
