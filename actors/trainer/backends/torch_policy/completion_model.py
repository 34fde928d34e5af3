"""A Hugging Face causal language model that computes the log-probabilities of completions."""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from .....transport.state_dict import without_ties
from ....messages import ModelConfig
from ....model_sources import rotation_limit
from ....pretrained import load_model, unset_model
from ...loss import token_logprobs
from ...padding import PaddedRows
from .fused_norm import fuse_norms


def build_model(config: ModelConfig, seed: int | None) -> Any:
    """A Hugging Face causal language model with float32 master weights, on the CPU, in evaluation mode.

    Without dropout, as in the engine: the gradient is that of the policy that generated. TRL does the same. ``seed``
    fixes the random weights of a model made from ``config.config``, independently of models built before in this
    process; None leaves the weights unset. Torch's global generator is left as it was.
    """
    if seed is None:
        model: Any = unset_model(config, torch.float32)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(random_stream(seed))
            model = load_model(config, torch.float32)
    model.config.architectures = [type(model).__name__]
    evaluating: Any = model.eval()
    return evaluating


def dropout_settings(model: Any) -> dict[str, float]:
    """The dropout probabilities above 0 in the model's config, by name."""
    settings = model.config.get_text_config(decoder=True).to_dict()
    return {
        name: value
        for name, value in settings.items()
        if "drop" in name and isinstance(value, float) and value > 0
    }


class CompletionModel:
    """``model`` is the live module on the config's device, its parameters float32. ``seed``: see ``build_model``."""

    def __init__(self, config: ModelConfig, seed: int | None) -> None:
        self._device = torch.device(config.device)
        self.model = fuse_norms(build_model(config, seed)).to(self._device)
        self.vocab_size = int(self.model.get_input_embeddings().num_embeddings)
        self._bfloat16 = config.dtype == "bfloat16"
        self._longest = rotation_limit(self.model.config)
        # The output layer and everything after it see the completion tokens only: [N, V], no padding.
        self._positions: Tensor | None = None
        self.model.get_output_embeddings().register_forward_pre_hook(self._keep_completions)

    def logprobs(self, rows: PaddedRows, temperatures: float | Tensor = 1.0) -> Tensor:
        """Log-probabilities ``[N]`` of the completion tokens, with gradient. ``temperatures``: one, or ``[N]``.

        Raises ``ValueError`` for rows beyond the model's ``rotation_limit``.
        """
        if self._longest is not None and rows.input_ids.shape[1] > self._longest:
            raise ValueError(
                f"{rows.input_ids.shape[1]} tokens: the model's rotations (longrope) change behind {self._longest}"
            )
        self._positions = rows.positions
        try:
            with self.autocast():
                logits = self.model(input_ids=rows.input_ids, use_cache=False).logits
        finally:
            self._positions = None
        return token_logprobs(logits, rows.targets, temperatures)

    def autocast(self) -> torch.autocast:
        """The precision to compute in, for a ``with``."""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._bfloat16)

    def _keep_completions(self, _module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        """Before the output layer: hidden states ``[rows, longest, H]`` to the ``[N, H]`` at completions."""
        if self._positions is None:
            return None
        return (args[0].flatten(0, 1).index_select(0, self._positions),)


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """The live state-dict tensors by name, those shared by several names (tied weights) once."""
    return {name: tensor.detach() for name, tensor in without_ties(model.state_dict(keep_vars=True)).items()}


def derived_seed(seed: int, name: str) -> int:
    """A seed of its own for every policy of a run, the same in every process."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()) >> 1


def random_stream(seed: int) -> Tensor:
    """The state (uint8) of torch's CPU generator just seeded; touches neither the global one nor a GPU."""
    return torch.Generator().manual_seed(seed).get_state()
