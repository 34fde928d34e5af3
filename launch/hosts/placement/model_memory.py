"""The memory of models' weights, from the headers of files that are on this host. Nothing is downloaded."""

from math import prod
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from ....actors.messages import ModelConfig
from ....actors.names import PolicyName
from ...config.run_config import RunConfig

_ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2}


def known_weights(config: RunConfig) -> dict[PolicyName, int]:
    """Bytes of each policy's weights in its ``dtype``; without the policies whose files are not in a folder here."""
    sizes = {
        name: weights_bytes(model)
        for name, policy in config.policies.items()
        if (model := policy.used_model) is not None
    }
    return {name: size for name, size in sizes.items() if size}


def weights_bytes(model: ModelConfig) -> int:
    """0 if it is not known."""
    folder = Path(model.path) if model.path is not None else None
    if folder is None or not folder.is_dir():
        return 0
    try:
        parameters = sum(map(_parameters, sorted(folder.glob("*.safetensors"))))
    except (OSError, SafetensorError):  # a damaged file is refused when it is loaded
        return 0
    return parameters * _ITEM_BYTES[model.dtype]


def _parameters(file: Path) -> int:
    with safe_open(file, framework="np") as tensors:
        return sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
