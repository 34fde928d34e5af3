"""Checks that the supervised examples that are messages go through their policies' chat templates."""

from collections.abc import Iterator

from ....actors.chat.conversation import Conversation
from ....actors.chat.model_codec import model_codec
from ....actors.errors import RecipeError
from ....actors.model_sources import load_tokenizer
from ....actors.recipe.recipe import Recipe
from ....actors.trainer.pool.sft_rows import sft_rows
from ...config.run_config import RunConfig


def example_problems(config: RunConfig, *, local_files_only: bool) -> Iterator[str]:
    """The first mistake of each policy in its first batch. To be called once the recipe and the models have no
    problems."""
    recipe = Recipe(config.recipe_config())
    for name, policy in config.trained.items():
        model, size = policy.used_model, policy.sft.batch_size
        agents = config.agents_of(name) if policy.sft.batches and model is not None else ()
        for agent in agents:
            if not any(isinstance(example, Conversation) for example in recipe.sft(agent, 0, size)):
                continue
            assert model is not None, "there are no agents without"
            tokenizer = load_tokenizer(model, local_files_only=local_files_only)
            try:
                list(sft_rows(recipe, agent, 0, size, model_codec(model, tokenizer), tokenizer.eos_token_id))
            except RecipeError as error:
                yield f"policies.{name}.sft: {error}"
                break
