"""The weights of a policy that is not trained, from files to the memory that instances read: tensor by tensor.

Random weights, and files that transformers has to convert, are whole in memory beside that: see ``model_rows.py``.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ....messages import LoraConfig
from ....names import PolicyName
from ...policy_files import check_tensors, read_tensors_into
from ...saved_policy import POSITION_FILE, WEIGHTS_FILE
from ...trainer_setup import PolicySetup
from ..weights_source import WeightsSource
from .completion_model import derived_seed, named_weights, outlined_model
from .gang_rank import ALONE
from .own_weights import file_name, saved_weights
from .trained_models import check_base


def frozen_source(policy: PolicyName, setup: PolicySetup, seed: int) -> WeightsSource:
    """The weights that a policy in training would publish first: those of ``setup.init_from``, or the initial ones.
    ``seed``: of the run. Raises CheckpointIncomplete, CheckpointMismatch."""
    if setup.lora is not None:
        return _of_adapter(setup, setup.lora, derived_seed(seed, policy), seed)
    config = setup.real_model
    model, rows = outlined_model(
        config, derived_seed(seed, policy) if setup.init_from is None else None, ALONE
    )
    weights = named_weights(model)

    def read() -> Iterable[tuple[str, Tensor]]:
        for name, tensor in weights.items():
            yield name, rows.pop(name)() if tensor.is_meta else tensor

    outline = _outline(weights, setup)
    if setup.init_from is None:
        return WeightsSource(outline, lambda into: _copy(read(), into))
    file = setup.init_from / WEIGHTS_FILE
    check_tensors(file, saved_weights(model))
    return WeightsSource(outline, lambda into: read_tensors_into(file, into))


def _of_adapter(setup: PolicySetup, lora: LoraConfig, adapter_seed: int, seed: int) -> WeightsSource:
    # Imported here: peft takes seconds, and may not be installed.
    from .adapters import adapter_weights, check_adapter_config
    from .stored_adapter import StoredAdapter

    config, folder = setup.real_model, setup.init_from
    policy = StoredAdapter(config, config.weights_seed(seed), lora, adapter_seed)
    if folder is not None:
        check_adapter_config(folder, lora)
        if (folder / POSITION_FILE).exists():  # an adapter may come from elsewhere
            check_base(folder / POSITION_FILE, policy.base_digest())
        policy.read_adapter(folder)
    if setup.publishes_adapter:
        outline = {file_name(name): tensor for name, tensor in policy.adapter_outline().items()}
        return WeightsSource(
            _outline(outline, setup), lambda into: _copy(adapter_weights(policy.model), into)
        )
    return WeightsSource(_outline(policy.outline(), setup), lambda into: _copy(policy.merged(), into))


def _outline(weights: Mapping[str, Tensor], setup: PolicySetup) -> dict[str, Tensor]:
    """The ``weights`` in the types that instances compute in."""
    narrow = setup.real_model.dtype == "bfloat16"
    return {
        name: torch.empty(
            tensor.shape,
            dtype=torch.bfloat16 if narrow and tensor.is_floating_point() else tensor.dtype,
            device="meta",
        )
        for name, tensor in weights.items()
    }


@torch.no_grad()
def _copy(weights: Iterable[tuple[str, Tensor]], into: Mapping[str, Tensor]) -> None:
    for name, tensor in weights:
        into[name].copy_(tensor)
