"""The weights of a whole model that is not trained: without gradients and moments."""

import torch
from torch import Tensor

from ...policy_files import check_tensors, read_tensors_into
from ...saved_policy import WEIGHTS_FILE
from ...trainer_setup import PolicySetup
from .completion_model import build_model, named_weights
from .own_weights import saved_weights


def frozen_model(setup: PolicySetup, seed: int) -> dict[str, Tensor]:
    """The weights to publish, as ``TrainedModels.published`` gives them: those of ``setup.init_from``, or the initial
    ones, by ``seed`` if they are random. Raises CheckpointIncomplete, CheckpointMismatch."""
    config = setup.real_model
    model = build_model(config, seed).requires_grad_(False)
    if setup.init_from is not None:
        weights, file = saved_weights(model), setup.init_from / WEIGHTS_FILE
        check_tensors(file, weights)
        read_tensors_into(file, weights)
    narrow = config.dtype == "bfloat16"
    return {
        name: tensor.to(torch.bfloat16) if narrow and tensor.is_floating_point() else tensor
        for name, tensor in named_weights(model).items()
    }
