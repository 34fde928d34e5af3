"""All built-in recipes: a run of two steps in memory, a tokenizer that fits the model, held-out problems."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from flexmarl.actors.recipe.recipe import Recipe
from flexmarl.launch.config.config_reading import RECIPES, recipe_folder, resolve
from flexmarl.launch.simulate.simulation import simulate

from .text_pairs import text_pairs

IN_MEMORY = ("coder-tester", "countdown", "kitchen", "kuhn-poker", "plan-path", "tool-math")
TASKS = (*IN_MEMORY, "coding-harness")
"""A program of a trajectory is in real time."""
SIMULATED = ("engine.name=simulated", "trainer.name=simulated", "training.steps=2", "training.queries_per_step=4",
             "training.micro_batch=4", "evaluation.every=0", "checkpoint.every=0")  # fmt: skip


@pytest.mark.parametrize("name", IN_MEMORY)
def test_two_steps_of_a_recipe_run_in_memory(name: str, tmp_path: Path) -> None:
    simulation = simulate(resolve(name, SIMULATED), tmp_path / "run", seed=1)
    assert simulation.result is not None and simulation.result.last_step == 2
    steps = [json.loads(line) for line in simulation.directory.metrics.read_text().splitlines()]
    assert all(step.get("failed_trajectories", 0) == 0 for step in steps)


@pytest.mark.parametrize("name", TASKS)
def test_every_prompt_and_answer_of_the_sft_has_tokens_and_fits(name: str) -> None:
    config = resolve(name, [])
    recipe = Recipe(config.recipe_config())
    for agent, settings in config.agents.items():
        if not config.policies[settings.policy].train:
            continue  # the past of another policy
        model = config.policies[settings.policy].real_model
        tokenizer: Any = AutoTokenizer.from_pretrained(model.tokenizer_source)
        made = AutoConfig.for_model(**(model.config or {}))
        assert made.vocab_size == len(tokenizer)
        assert (made.eos_token_id, made.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
        for prompt, completion in text_pairs(recipe, agent, 0, 64):
            tokens, answer = tokenizer.encode(prompt), tokenizer.encode(completion)
            assert tokenizer.decode(tokens) == prompt
            assert len(answer) <= settings.sampling.max_new_tokens
            assert len(tokens) + settings.sampling.max_new_tokens <= made.max_position_embeddings


@pytest.mark.parametrize("name", TASKS)
def test_a_query_depends_on_position_and_seed_alone(name: str) -> None:
    one, again, other = (Recipe(resolve(name, [f"seed={s}"]).recipe_config()) for s in (0, 0, 1))
    positions = (7, 3, 99, 100, 101, 102, 103, 104)
    assert [one.train_query(n) for n in positions] == [again.train_query(n) for n in positions]
    assert [one.train_query(n) for n in positions] != [other.train_query(n) for n in positions]
    assert one.eval_queries() == again.eval_queries()
    agent = next(iter(resolve(name, []).agents))
    assert one.sft(agent, 2, 8) == again.sft(agent, 2, 8) != one.sft(agent, 3, 8)


@pytest.mark.parametrize("name", ["coder-tester", "countdown", "kitchen", "plan-path", "tool-math"])
def test_evaluation_problems_are_never_trained_on(name: str) -> None:
    recipe = Recipe(resolve(name, []).recipe_config())
    held_out = {query.text for query in recipe.eval_queries()}
    assert held_out.isdisjoint(recipe.train_query(position).text for position in range(2000))


@pytest.mark.parametrize("name", TASKS)
def test_the_readme_of_a_recipe_says_how_its_tokenizer_is_made(name: str, tmp_path: Path) -> None:
    from flexmarl.launch.recipes.make_tokenizer import make_tokenizer

    folder = recipe_folder(name)
    assert re.search(rf"flexmarl train {name}\b", (folder / "README.md").read_text())
    committed = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())
    words = [*committed["model"]["vocab"]]
    assert words[-2:] == ["<eos>", "<pad>"]
    made = json.loads(make_tokenizer(words[:-2]).backend_tokenizer.to_str())
    for part in ("model", "pre_tokenizer", "decoder", "added_tokens"):
        assert made[part] == committed[part]


def test_every_recipe_with_a_readme_is_tested_here() -> None:
    found = {path.parent.name.replace("_", "-") for path in RECIPES.glob("*/README.md")}
    assert found == {*TASKS, "math-debate"}  # test_math_debate.py: its model and its data are not here
