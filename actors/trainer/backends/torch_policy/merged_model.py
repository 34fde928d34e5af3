"""A saved LoRA policy as a whole model."""

from pathlib import Path

import torch

from ....json_files import read_json
from ....messages import LoraConfig, ModelConfig
from ...policy_files import write_one_by_one
from ...saved_policy import ADAPTER_CONFIG_FILE, POSITION_FILE, WEIGHTS_FILE
from .stored_adapter import StoredAdapter
from .trained_models import check_base


def write_merged(saved: Path, folder: Path) -> None:
    """Writes the model's config and its weights with the adapter of ``saved`` in them into ``folder``, in float32:
    tensor by tensor, from the files of the base.

    Raises CheckpointIncomplete, CheckpointMismatch if the base is not the one that the adapter was trained over, and
    OSError if it can't be loaded.
    """
    about = read_json(saved / POSITION_FILE)["base"]
    config = read_json(saved / ADAPTER_CONFIG_FILE)
    lora = LoraConfig(rank=config["r"], alpha=config["lora_alpha"], targets=config["target_modules"])
    base = ModelConfig.model_validate(about["model"] | {"device": "cpu"})
    policy = StoredAdapter(base, about["seed"], lora)
    check_base(saved / POSITION_FILE, policy.base_digest())
    policy.read_adapter(saved)
    policy.model.config.save_pretrained(folder)
    policy.model.generation_config.save_pretrained(folder)
    outline = {name: tensor.to(torch.float32) for name, tensor in policy.outline().items()}
    write_one_by_one(
        folder / WEIGHTS_FILE, outline, ((name, tensor.float()) for name, tensor in policy.merged())
    )
