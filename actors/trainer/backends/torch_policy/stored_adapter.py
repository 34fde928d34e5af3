"""A LoRA adapter beside the files of its base, whose weights are read tensor by tensor when they are asked for.

A policy in training has a whole ``FrozenBase``; one that is only published or exported needs a tensor of it at a time.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....messages import LoraConfig, ModelConfig
from ...policy_files import check_tensors, read_tensors_into
from ...saved_policy import ADAPTER_FILE
from .adapters import merged_weights, with_adapter
from .completion_model import freeze, named_weights, outlined_model
from .frozen_base import joined_digest, row_sum
from .gang_rank import ALONE
from .own_weights import is_adapter, own_weights, saved_weights


class StoredAdapter:
    """``model``: the base on ``meta`` with the adapter, whose values are those of ``adapter_seed``; None: not set.

    ``config``: of the base, on the CPU; random weights are those of ``seed``, which are drawn whole. Raises as
    ``load_model``, and ``ValueError`` for a target that the base does not have.
    """

    def __init__(
        self, config: ModelConfig, seed: int, lora: LoraConfig, adapter_seed: int | None = None
    ) -> None:
        base, self._rows = outlined_model(config, seed, ALONE)
        dtype: torch.dtype = base.dtype
        freeze(base, config)
        self._base: Any = base
        self._types = {name: parameter.dtype for name, parameter in base.named_parameters()}
        self.model, values = with_adapter(base, lora, adapter_seed, dtype=dtype, path=config.path)
        for name, parameter in [*self.model.named_parameters()]:
            if is_adapter(name):
                owner, _, leaf = name.rpartition(".")
                value = values[name] if values else torch.empty_like(parameter, device="cpu")
                setattr(self.model.get_submodule(owner), leaf, torch.nn.Parameter(value, requires_grad=False))

    def read_adapter(self, folder: Path) -> None:
        """Raises CheckpointIncomplete, CheckpointMismatch."""
        adapter = saved_weights(self.model)
        check_tensors(folder / ADAPTER_FILE, adapter)
        read_tensors_into(folder / ADAPTER_FILE, adapter)

    def base_digest(self) -> str:
        """See ``FrozenBase.digest``. Reads all weights once."""
        outline = dict(self._base.named_parameters())
        return joined_digest(
            (name, outline[name].shape, row_sum(self._read(name))) for name in sorted(outline)
        )

    def outline(self) -> dict[str, Tensor]:
        """The weights of ``merged`` without memory, in the types of the base."""
        return {name: tensor.to("meta") for name, tensor in named_weights(self._base).items()}

    def adapter_outline(self) -> dict[str, Tensor]:
        """The same of the adapter alone, by its names in the model."""
        return {name: tensor.to("meta") for name, tensor in own_weights(self.model).items()}

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """See ``merged_weights``: one is in memory at a time."""
        return merged_weights(self.model, ALONE, self._read)

    def _read(self, name: str) -> Tensor:
        """A weight of the base in the type that it computes in."""
        return self._rows[name]().to(self._types[name])
