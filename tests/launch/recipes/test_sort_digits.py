"""The built-in recipe: its problems, its rewards, and that config, tokenizer and workflow fit together."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer

from flexmarl.actors.errors import RecipeError
from flexmarl.actors.recipe.recipe import Recipe, RecipeConfig
from flexmarl.actors.workflow import Prompt, Query, Turn
from flexmarl.launch.config.config_reading import recipe_folder, resolve
from flexmarl.launch.recipes import make_tokenizer

from .text_pairs import text_pairs

FOLDER = recipe_folder("sort-digits")
DATA = {"digits": 5, "eval_problems": 500}
POSITIONS = st.integers(min_value=0, max_value=10**9)
SEEDS = st.integers(min_value=0, max_value=2)


def load(seed: int = 0, **data: int) -> Recipe:
    return Recipe(RecipeConfig(folder=str(FOLDER), data={**DATA, **data}, seed=seed))


RECIPES = {seed: load(seed) for seed in range(3)}
HELD_OUT = {seed: {query.text for query in recipe.eval_queries()} for seed, recipe in RECIPES.items()}


def is_problem(text: str) -> bool:
    return len(set(text)) == len(text) == 5 and set(text) <= set("0123456789")


class ScriptedAgent:
    """Always gives the same answer, and records its prompts."""

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.prompts: list[Prompt] = []

    async def generate(self, prompt: Prompt, **options: Any) -> Turn:
        self.prompts.append(prompt)
        return Turn("an agent", self.answer, (), ())


# --------------------------------------------------------------------------- problems


@given(POSITIONS, SEEDS)
def test_a_training_query_is_a_problem_that_is_not_held_out(position: int, seed: int) -> None:
    query = RECIPES[seed].train_query(position)
    assert is_problem(query.text)
    assert query.text not in HELD_OUT[seed]
    assert query.data == {"answer": "".join(sorted(query.text))}


def test_the_held_out_problems_are_all_different() -> None:
    queries = RECIPES[0].eval_queries()
    assert len({query.text for query in queries}) == len({query.id for query in queries}) == 500
    assert all(is_problem(query.text) for query in queries)
    assert all(query.data == {"answer": "".join(sorted(query.text))} for query in queries)


def test_a_query_depends_on_position_and_seed_alone() -> None:
    """The texts themselves: a run resumed by another process or a later version must continue with the same data."""
    later = load(seed=0)
    assert [later.train_query(position) for position in (700, 1)] == [
        Query("q000700", "04857", {"answer": "04578"}),
        Query("q000001", "83092", {"answer": "02389"}),
    ]
    assert later.eval_queries()[0] == Query("e000000", "75932", {"answer": "23579"})


def test_positions_and_seeds_give_different_queries() -> None:
    texts = {seed: [RECIPES[seed].train_query(position).text for position in range(1000)] for seed in (0, 1)}
    assert len(set(texts[0])) > 900
    assert sum(a == b for a, b in zip(texts[0], texts[1], strict=True)) < 10
    assert len({RECIPES[0].train_query(position).id for position in range(1000)}) == 1000


def test_too_few_problems_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"data\.digits=2 makes 90 problems.*data\.eval_problems=500"):
        load(digits=2).train_query(0)


# --------------------------------------------------------------------------- SFT


def problem_of(agent: str, prompt: str) -> str:
    """The problem of a SFT prompt; fails unless the prompt has the form that the workflow uses for this agent."""
    assert prompt.endswith("=")
    text, question, draft = prompt[:-1].partition("?")
    assert bool(question) == (agent == "checker")
    if question:
        assert sorted(draft) == sorted(text)
    return text


@pytest.mark.parametrize("agent", ["sorter", "checker"])
def test_sft_shows_answers_but_not_their_order(agent: str) -> None:
    examples = [example for batch in range(100) for example in text_pairs(RECIPES[0], agent, batch, 64)]
    problems = [problem_of(agent, prompt) for prompt, _ in examples]
    assert all(is_problem(text) for text in problems)
    assert HELD_OUT[0].isdisjoint(problems)
    assert all(sorted(text) == sorted(done) for text, (_, done) in zip(problems, examples, strict=True))
    right = sum(completion == "".join(sorted(completion)) for _, completion in examples)
    assert right / len(examples) == pytest.approx(1 / 120, abs=0.005)  # as often as chance has it


def test_sft_batches_are_reproducible_and_differ() -> None:
    def batch(agent: str, number: int, seed: int) -> Sequence[tuple[str, str]]:
        return text_pairs(load(seed), agent, number, 8)

    assert batch("checker", 3, 0) == batch("checker", 3, 0)
    assert len(batch("checker", 3, 0)) == 8
    others = [batch("checker", 4, 0), batch("checker", 3, 1), batch("sorter", 3, 0)]
    assert batch("checker", 3, 0) not in others


# --------------------------------------------------------------------------- the workflow


@pytest.mark.parametrize(
    ("draft", "final", "sorter", "checker"),
    [
        ("12345", "12345", 1.0, 1.0),
        ("12345", "31542", 0.5, 0.0),
        ("12354", "12345", 0.5, 1.0),
        ("?=", "", 0.0, 0.0),
    ],
)
async def test_rewards(draft: str, final: str, sorter: float, checker: float) -> None:
    agents = {"sorter": ScriptedAgent(draft), "checker": ScriptedAgent(final)}
    query = Query("q", "31542", {"answer": "12345"})
    rewards = (await RECIPES[0].workflow(query, agents)).checked()
    assert agents["sorter"].prompts == ["31542="]
    assert agents["checker"].prompts == [f"31542?{draft}="]
    assert rewards.by_agent == {"sorter": sorter, "checker": checker}
    assert rewards.metrics == {"accuracy": checker, "draft_accuracy": float(draft == "12345")}


# --------------------------------------------------------------------------- tokenizer and config


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER / "tokenizer")


@given(text=st.text(alphabet="0123456789=?", max_size=30))
def test_every_character_is_one_token(tokenizer: Any, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokens == ["0123456789=?".index(character) for character in text]
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([*tokens, tokenizer.eos_token_id], skip_special_tokens=True) == text


@pytest.mark.parametrize("text", ["3 1", "a", "3\n", "³"])
def test_other_characters_are_refused(tokenizer: Any, text: str) -> None:
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode(text)


def test_the_script_makes_the_committed_tokenizer(tmp_path: Path) -> None:
    make_tokenizer.main(str(tmp_path), "0123456789=?")
    made, committed = (
        json.loads((folder / "tokenizer.json").read_text()) for folder in (tmp_path, FOLDER / "tokenizer")
    )
    for part in ("model", "pre_tokenizer", "decoder", "added_tokens"):
        assert made[part] == committed[part]


def test_the_config_fits_tokenizer_and_workflow(tokenizer: Any) -> None:
    config = resolve("sort-digits", [])
    assert set(config.agents) == {"sorter", "checker"}
    longest_problem = Recipe(config.recipe_config()).train_query(0).text
    for agent in config.agents.values():
        policy = config.policies[agent.policy]
        assert policy.real_model.tokenizer == str(FOLDER / "tokenizer")
        model = AutoConfig.for_model(**(policy.real_model.config or {}))
        assert model.vocab_size == len(tokenizer)
        assert (model.eos_token_id, model.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
        answer = agent.sampling.max_new_tokens
        assert answer == len(longest_problem) + 1
        assert len(f"{longest_problem}?=") + 2 * answer <= model.max_position_embeddings
