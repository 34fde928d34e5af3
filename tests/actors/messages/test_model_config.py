"""Random weights belong to an architecture and a seed."""

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
