"""The memory of models, from the headers of files."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from flexmarl.actors.messages import ModelConfig
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.hosts.placement.model_memory import known_weights, weights_bytes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """100 + 20 parameters in two files."""
    save_file({"a": np.zeros((10, 10), np.float16)}, tmp_path / "model-1.safetensors")
    save_file({"b": np.zeros(20, np.float16)}, tmp_path / "model-2.safetensors")
    return tmp_path


def test_parameters_are_counted_in_the_dtype_of_the_run(model: Path) -> None:
    assert weights_bytes(ModelConfig(path=str(model))) == 120 * 4
    assert weights_bytes(ModelConfig(path=str(model), dtype="bfloat16")) == 120 * 2


def test_a_model_of_a_hub_a_new_one_and_damaged_files_are_not_known(model: Path) -> None:
    assert weights_bytes(ModelConfig(path="Qwen/Qwen2.5-0.5B-Instruct")) == 0
    assert known_weights(resolve("sort-digits", [])) == {}
    (model / "model-2.safetensors").write_bytes(b"damaged")
    assert weights_bytes(ModelConfig(path=str(model))) == 0
