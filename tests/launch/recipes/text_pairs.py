"""The supervised examples of a recipe that writes them as pairs of texts."""

from flexmarl.actors.recipe.recipe import Recipe


def text_pairs(recipe: Recipe, agent: str, batch: int, size: int) -> list[tuple[str, str]]:
    examples = recipe.sft(agent, batch, size)
    pairs = [example for example in examples if isinstance(example, tuple)]
    assert len(pairs) == len(examples) > 0
    return pairs
