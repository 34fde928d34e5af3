"""Supervised examples of messages that a chat template can't show are refused before the start."""

from pathlib import Path
from typing import Any

import pytest

from flexmarl.launch.config.config_reading import check
from flexmarl.launch.run.preflight.sft_checks import example_problems

from ....actors.chat.chat_tokenizer import CHATML, VOCABULARY, WITHOUT_TOOL_RESULTS, chat_tokenizer

CODE = """
async def workflow(query, agents): ...
def train_query(position, seed): ...
def eval_queries(seed): return []
def sft(agent, batch, size, seed):
    if agent == "texts":
        return [("1+1=", "2")] * size
    roles = ("user", "tool", "assistant")
    return [[{"role": role, "content": f"the {role}"} for role in roles]] * size
"""
MODEL = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": VOCABULARY,
}  # fmt: skip


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (CHATML, None),
        (WITHOUT_TOOL_RESULTS, "leaves out or rewrites messages[1], of the role 'tool': 'the tool'"),
        (None, "has no chat template"),
    ],
)
def test_the_first_batch_goes_through_the_template(
    tmp_path: Path, template: str | None, problem: str | None
) -> None:
    (tmp_path / "workflow.py").write_text(CODE)
    chat_tokenizer(template).save_pretrained(tmp_path / "tokenizer")
    agent: dict[str, Any] = {
        "model": {"config": MODEL, "tokenizer": str(tmp_path / "tokenizer")},
        "sft": {"batches": 1, "batch_size": 2},
    }
    config = check(
        {
            "recipe": str(tmp_path),
            "agents": {"chats": agent, "texts": agent},
            "training": {"steps": 1, "queries_per_step": 4, "trajectories_per_query": 8, "micro_batch": 1},
        },
        "config",
    )
    lines = list(example_problems(config, local_files_only=True))
    if problem is None:
        assert lines == []
        return
    (line,) = lines
    assert line.startswith(
        "policies.chats.sft: workflow.py: sft gives example 0 of batch 0 for agent chats: "
    )
    assert problem in line
