"""A run whose agents talk by messages: a small model with the tokenizer of Qwen3, by its family and by its template."""

from pathlib import Path

import torch

from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.pretrained import load_model

from ..actors.chat.qwen3_tokenizer import qwen3_tokenizer
from ..actors.inference.test_instance_turns import ARCHITECTURE
from .in_process import RunsHere

WORKFLOW = '''
from flexmarl.actors import Query, Rewards


async def add(a: int) -> int:
    """The sum."""
    return a


async def workflow(query, agents):
    solver = agents["solver"]
    question = {"role": "user", "content": query.text}
    first = await solver.generate([{"role": "system", "content": "Think."}, question], tools=[add])
    second = await solver.generate([first, {"role": "tool", "name": "add", "content": "2"}], tools=[add])
    third = await solver.generate([second, {"role": "user", "content": "Sure?"}], tools=[add])
    for before, after in ((first, second), (second, third)):
        assert after.prompt_tokens[: len(before.prompt_tokens + before.tokens)] == before.prompt_tokens + before.tokens
    roles = [message["role"] for message in third.conversation]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"], roles
    assert third.conversation[-1] == third.message
    return Rewards(solver=1.0)


def train_query(position, seed):
    return Query(f"q{position}", f"{position} + 1?")


def eval_queries(seed):
    return []


def sft(agent, batch, size, seed):
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    thought = {"role": "assistant", "content": "", "reasoning_content": "add", "tool_calls": [call]}
    messages = [
        {"role": "user", "content": "1 + 1?"}, thought, {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2"}, {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes"},
    ]
    return [{"messages": messages, "tools": [add]}] * size
'''
CONFIG = """
agents:
  solver:
    model: {{path: {model}, renderer: qwen3}}
    engine: {{name: embedded}}
    sampling: {{max_new_tokens: 8}}
    sft: {{batches: 1, batch_size: 2}}
training: {{steps: 1, queries_per_step: 2, trajectories_per_query: 2, micro_batch: 4}}
"""


def test_every_turn_of_a_run_keeps_the_tokens_before_it(tmp_path: Path, runs_here: RunsHere) -> None:
    model, recipe, tokenizer = tmp_path / "model", tmp_path / "chats", qwen3_tokenizer()
    architecture = {**ARCHITECTURE, "vocab_size": len(tokenizer)}
    load_model(ModelConfig(config=architecture, tokenizer="none"), torch.float32).save_pretrained(model)
    tokenizer.save_pretrained(model)
    recipe.mkdir()
    (recipe / "workflow.py").write_text(WORKFLOW)
    (recipe / "config.yaml").write_text(CONFIG.format(model=model))
    run = runs_here.train("chats", recipe=recipe)
    assert run.status == 0 and not run.problems, run.text
    (line,) = run.metrics
    assert (line["failed_trajectories"], line["samples/solver"]) == (0, 12)
