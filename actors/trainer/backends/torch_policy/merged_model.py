"""A saved LoRA policy as a whole model."""

from pathlib import Path

import torch

from ....json_files import read_json
from ....messages import LoraConfig, ModelConfig
from ...policy_files import check_tensors, read_tensors_into, write_tensors
from ...saved_policy import ADAPTER_CONFIG_FILE, ADAPTER_FILE, POSITION_FILE, WEIGHTS_FILE
from .adapters import merged_weights, with_adapter
from .frozen_base import FrozenBase
from .gang_rank import ALONE
from .model_rows import fill
from .own_weights import saved_weights
from .trained_models import check_base


def write_merged(saved: Path, folder: Path) -> None:
    """Writes the model's config and its weights with the adapter of ``saved`` in them into ``folder``, in float32.

    Raises CheckpointIncomplete, CheckpointMismatch if the base is not the one that the adapter was trained over, and
    OSError if it can't be loaded.
    """
    about = read_json(saved / POSITION_FILE)["base"]
    base = FrozenBase(ModelConfig.model_validate(about["model"] | {"device": "cpu"}), about["seed"], ALONE)
    check_base(saved / POSITION_FILE, base, ALONE)
    config = read_json(saved / ADAPTER_CONFIG_FILE)
    lora = LoraConfig(rank=config["r"], alpha=config["lora_alpha"], targets=config["target_modules"])
    model, _ = with_adapter(base.outline, lora)
    fill(model, model, base.rows_in(model), torch.device("cpu"))
    adapter = saved_weights(model)
    check_tensors(saved / ADAPTER_FILE, adapter)
    read_tensors_into(saved / ADAPTER_FILE, adapter)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    path = folder / WEIGHTS_FILE
    merged = {name: tensor.float().contiguous() for name, tensor in merged_weights(model, ALONE)}
    write_tensors(path, merged)
