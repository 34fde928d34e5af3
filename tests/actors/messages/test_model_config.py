"""Random weights belong to an architecture and a seed."""

import pytest

from flexmarl.actors.messages import ModelConfig

CONFIG = {"model_type": "qwen3", "hidden_size": 32}


def test_random_weights_are_the_same_wherever_the_recipe_lies() -> None:
    seed = ModelConfig(config=CONFIG, tokenizer="/recipes/first/tokenizer").weights_seed(3)
    moved = dict(reversed(CONFIG.items()))
    assert ModelConfig(config=moved, tokenizer="/elsewhere/tokenizer", device="cuda").weights_seed(3) == seed


def test_random_weights_differ_by_the_run_s_seed_and_by_the_architecture() -> None:
    model = ModelConfig(config=CONFIG, tokenizer="tokenizer")
    other = ModelConfig(config=CONFIG | {"hidden_size": 64}, tokenizer="tokenizer")
    assert len({model.weights_seed(3), model.weights_seed(4), other.weights_seed(3)}) == 3


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16"), ("cuda:1", "bfloat16"), (None, "float32")]
)
def test_the_type_of_numbers_follows_the_device_and_is_written_down(device: str | None, dtype: str) -> None:
    where = {} if device is None else {"device": device}
    for written in ({}, {"dtype": "auto"}):
        model = ModelConfig.model_validate({"path": "m", **where, **written})
        assert model.dtype == model.model_dump()["dtype"] == dtype
    chosen = ModelConfig.model_validate({"path": "m", **where, "dtype": "float32"})
    assert chosen.dtype == "float32"
