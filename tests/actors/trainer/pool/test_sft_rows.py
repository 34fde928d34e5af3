"""Supervised examples as tokens: pairs of texts as they are, conversations by the chat template."""

from pathlib import Path

import pytest

from flexmarl.actors.chat.tokenizer_codec import TokenizerCodec
from flexmarl.actors.errors import RecipeError
from flexmarl.actors.names import AgentName
from flexmarl.actors.recipe.recipe import Recipe, RecipeConfig
from flexmarl.actors.trainer.pool.sft_rows import sft_rows

from ...chat.chat_tokenizer import CHATML, END, WITHOUT_TOOL_RESULTS, chat_tokenizer

SOLVER = AgentName("solver")
CODE = """
async def workflow(query, agents): ...
def train_query(position, seed): ...
def eval_queries(seed): return []
QUESTION, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
RESULT = {"role": "tool", "content": "7"}
def sft(agent, batch, size, seed):
    return [("1+1=", "2"), [QUESTION, ANSWER, QUESTION, ANSWER], {"messages": [QUESTION, RESULT, ANSWER]}][:size]
"""


def recipe(folder: Path, code: str = CODE) -> Recipe:
    (folder / "workflow.py").write_text(code)
    return Recipe(RecipeConfig(folder=str(folder), data={}, seed=0))


def test_a_pair_is_a_row_and_a_conversation_one_for_each_answer(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(CHATML)
    rows = list(sft_rows(recipe(tmp_path), SOLVER, 0, 3, TokenizerCodec(tokenizer), END))
    pair, first, second, last = rows
    assert pair == (tuple(tokenizer("1+1=").input_ids), (*tokenizer("2").input_ids, END))
    assert second[0][: len(first[0]) + len(first[1])] == first[0] + first[1]
    whole = tokenizer.decode(second[0] + second[1])
    turn = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"
    assert whole == f"{turn}\n{turn}", "as the template writes all of it"
    assert first[1] == second[1] == last[1] == (*tokenizer("2").input_ids, END)
    assert "<|im_start|>tool\n7<|im_end|>" in tokenizer.decode(last[0])


def test_a_message_that_the_template_leaves_out_is_named(tmp_path: Path) -> None:
    codec = TokenizerCodec(chat_tokenizer(WITHOUT_TOOL_RESULTS))
    problem = r"workflow\.py: sft gives example 2 of batch 5 for agent solver: the chat template"
    with pytest.raises(RecipeError, match=problem):
        list(sft_rows(recipe(tmp_path), SOLVER, 5, 3, codec, END))


@pytest.mark.parametrize(
    ("example", "problem"),
    [
        ("'ab'", "'ab' as example 0 of batch 0 for agent solver, not a pair of strings"),
        ("('a', 1)", "as example 0 of batch 0 for agent solver, not a pair of strings"),
        ("3", "3 as example 0"),
        ("[QUESTION]", "example 0 of batch 0 for agent solver with no message of the role 'assistant'"),
        ("{'messages': [QUESTION, ANSWER], 'tools': [len]}", "with the tool len is not an async function"),
    ],
)
def test_an_example_of_another_kind_is_refused(tmp_path: Path, example: str, problem: str) -> None:
    code = f"{CODE}\ndef sft(agent, batch, size, seed): return [{example}]\n"
    with pytest.raises(RecipeError, match=r"workflow\.py: sft gives ") as refused:
        recipe(tmp_path, code).sft("solver", 0, 1)
    assert problem in str(refused.value)
