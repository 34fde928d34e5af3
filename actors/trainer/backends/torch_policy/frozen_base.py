"""The models that LoRA adapters are trained over: they never change, and a process has each of them once."""

from functools import cached_property
from typing import Any

import torch
import xxhash

from ....messages import ModelConfig
from .completion_model import named_weights, placed_model


class FrozenBase:
    """``model`` without gradients, on the config's device in float32. Random weights are those of ``seed``."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.model: Any = placed_model(config, seed).requires_grad_(False)
        self._config, self._seed = config, seed

    def plain(self) -> dict[str, Any]:
        """Returns all that makes the same base again, and its digest, as plain values for a file."""
        return {"model": self._config.model_dump(mode="json"), "seed": self._seed, "digest": self.digest}

    @cached_property
    def digest(self) -> str:
        """xxh3 of all weights. Reads all of them once."""
        digest = xxhash.xxh3_64()
        for name, tensor in sorted(named_weights(self.model).items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


class FrozenBases:
    """The bases of a process, each made at its first use and kept. ``seed``: of the run."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._bases: dict[str, FrozenBase] = {}

    def base_of(self, config: ModelConfig) -> FrozenBase:
        """The same object for equal configs."""
        key = config.model_dump_json()
        if key not in self._bases:
            self._bases[key] = FrozenBase(config, config.weights_seed(self._seed))
        return self._bases[key]
