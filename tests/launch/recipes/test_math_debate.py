"""math-debate: its data, its rewards, and a run with a tiny model and data set of its own."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

from flexmarl.actors.errors import RecipeError
from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.pretrained import load_model
from flexmarl.actors.recipe.recipe import Recipe
from flexmarl.actors.workflow import Query, Turn
from flexmarl.launch.config.config_reading import recipe_folder, resolve
from flexmarl.launch.recipes.math_debate.workflow import number, questions, workflow

from ...actors.chat.chat_tokenizer import END, VOCABULARY, chat_tokenizer
from ..in_process import RunsHere
from .scripted import Scripted

QUERY = Query("q", "What is 40 + 2?", {"answer": "42", "debaters": 2, "rounds": 2})
TRAINED = [("Tom has 3 figs and eats 1.", "3 - 1 = 2\n#### 2"), ("Ann buys 1,000 nuts twice.", "#### 2,000")]
TESTED = [("Ten birds, two fly away.", "10 - 2 = <<10-2=8>>8\n#### 8")]
ARCHITECTURE = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": VOCABULARY,
    "tie_word_embeddings": False, "max_position_embeddings": 4096, "eos_token_id": END, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A folder in the format of GSM8K."""
    folder = tmp_path / "words"
    folder.mkdir()
    for split, rows in (("train", TRAINED), ("test", TESTED)):
        lines = (json.dumps({"question": question, "answer": answer}) for question, answer in rows)
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 5, no: #### -1,234.50 dollars", "-1234.5"),
        ("there are 3, so 12.", "12"),
        ("no number ####", None),
        ("", None),
    ],
)
def test_the_number_of_a_solution(text: str, found: str | None) -> None:
    assert number(text) == (None if found is None else Decimal(found))


async def test_each_solution_and_the_judge_are_paid_for_the_right_number() -> None:
    debater = Scripted("debater", "#### 42", "#### 41", "so #### 42.0", "no idea")
    judge = Scripted("judge", "#### 42")
    rewards = (await workflow(QUERY, {"debater": debater, "judge": judge})).checked()
    assert {turn.sample_id: reward for turn, reward in rewards.turns} == {
        "debater-0": 1, "debater-1": 0, "debater-2": 1, "debater-3": 0
    }  # fmt: skip
    assert rewards.by_agent == {"judge": 1.0}
    assert rewards.metrics["accuracy"] == 1.0 and rewards.metrics["numbers"] == pytest.approx(2 / 3)
    assert rewards.metrics["first_accuracy"] == rewards.metrics["last_accuracy"] == 0.5


async def test_a_debater_continues_its_conversation_with_the_solutions_of_the_others() -> None:
    debater, judge = Scripted("debater", "#### 1", "#### 2", "#### 3", "#### 4"), Scripted("judge", "#### 4")
    await workflow(QUERY, {"debater": debater, "judge": judge})
    second: Any = debater.prompts[2:]
    assert [isinstance(prompt[0], Turn) and prompt[0].text for prompt in second] == ["#### 1", "#### 2"]
    assert "#### 2" in second[0][1]["content"] and "#### 1" not in second[0][1]["content"]
    asked: Any = judge.prompts[0]
    assert (
        QUERY.text in asked[0]["content"]
        and "#### 3" in asked[0]["content"]
        and "#### 4" in asked[0]["content"]
    )


def test_every_question_is_drawn_before_any_comes_again(dataset: Path) -> None:
    recipe = Recipe(resolve("math-debate", [f"data.dataset={dataset}"]).recipe_config())
    drawn = [recipe.train_query(position) for position in range(6)]
    assert [{q.text for q in drawn[n : n + 2]} for n in (0, 2, 4)] == [{text for text, _ in TRAINED}] * 3
    assert {q.data["answer"] for q in drawn} == {"2", "2000"}
    assert [(q.text, q.data["answer"]) for q in recipe.eval_queries()] == [(TESTED[0][0], "8")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "train has no rows"),
        ('{"question": "1 + 1?", "answer": "two"}\n', "row 0 of train has no question or no number"),
    ],
)
def test_a_data_set_that_can_not_be_used_is_named(dataset: Path, lines: str, message: str) -> None:
    (dataset / "train.jsonl").write_text(lines)
    with pytest.raises(RecipeError, match=message):
        questions(str(dataset), None, "train")


def small(model: Path) -> list[str]:
    return [
        f"agent_defaults.model={{path: {model}}}", "agent_defaults.engine={name: embedded}",
        "agent_defaults.lora={rank: 4, alpha: 8}", "agent_defaults.sampling.max_new_tokens=6", "evaluation.every=1",
        "training.steps=2", "training.queries_per_step=2",
        "training.trajectories_per_query=2", "training.micro_batch=4",
    ]  # fmt: skip


def test_a_run_with_a_local_model_and_data_set(dataset: Path, tmp_path: Path, runs_here: RunsHere) -> None:
    """The recipe's own code, config and chat messages; only the model, the engine and the sizes are small."""
    model = tmp_path / "model"
    load_model(ModelConfig(config=ARCHITECTURE, tokenizer="none"), torch.float32).save_pretrained(model)
    chat_tokenizer().save_pretrained(model)
    run = runs_here.train(
        "debate", f"data.dataset={dataset}", *small(model), recipe=recipe_folder("math-debate")
    )
    assert run.status == 0 and not run.problems, run.text
    assert [line["failed_trajectories"] for line in run.metrics] == [0, 0]
    assert [(line["samples/debater"], line["samples/judge"]) for line in run.metrics] == [(16, 4)] * 2
    assert all(0 <= line["workflow/numbers"] <= 1 for line in run.metrics)
    assert "accuracy" in run.text
