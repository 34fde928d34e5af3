"""A task of two policies, played by a workflow's agents and by a gateway's HTTP API: the same draws and gradients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy

from ..actors.chat.qwen3_tokenizer import qwen3_tokenizer
from ..actors.inference.test_instance_turns import ARCHITECTURE
from .in_process import Finished, RunsHere

WORKFLOW = """
import httpx2
from flexmarl.actors import Query, Rewards, open_gateway


async def play(ask):
    '''Two branches of the solver's conversation, of which one is continued, and a conversation of the critic's.'''
    first = await ask("solver", None, "2 + 3?")
    second = await ask("solver", first, "Sure?")
    await ask("solver", first, "In words?")
    await ask("solver", second, "And 4?")
    await ask("critic", await ask("critic", None, "Is 5 right?"), "Why?")


async def by_agents(agents):
    turns = []

    async def ask(agent, before, text):
        message = {"role": "user", "content": text}
        turns.append(await agents[agent].generate([message] if before is None else [before, message]))
        return turns[-1]

    await play(ask)
    return turns


async def by_gateway(agents):
    async with (
        open_gateway(agents) as gateway,
        httpx2.AsyncClient(base_url=gateway.env["OPENAI_BASE_URL"], timeout=600) as client,
    ):
        async def ask(agent, before, text):
            messages = [*(before or ()), {"role": "user", "content": text}]
            headers = {"Authorization": f"Bearer {gateway.key}"}
            body = {"model": agent, "messages": messages}
            reply = await client.post("chat/completions", json=body, headers=headers)
            return [*messages, reply.json()["choices"][0]["message"]]

        await play(ask)
    return gateway.turns


async def workflow(query, agents):
    turns = await (by_gateway if query.data["gateway"] else by_agents)(agents)
    total = sum(sum(turn.tokens) for turn in turns)
    return Rewards(solver=total % 5 / 5, critic=total % 7 / 7)


def train_query(position, seed, gateway):
    return Query(f"q{position}", "", {"gateway": gateway})


def eval_queries(seed, gateway):
    return []
"""
CONFIG = """
seed: 3
agents: {{solver: {{}}, critic: {{}}}}
agent_defaults:
  model: {{config: {architecture}, tokenizer: {tokenizer}, renderer: qwen3}}
  engine: {{name: embedded, max_batch: 1}}
  sampling: {{max_new_tokens: 12}}
training: {{steps: 1, queries_per_step: 1, trajectories_per_query: 8, micro_batch: 8}}
"""


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """By policy: of the last step that any run here has taken."""
    noted: dict[str, torch.Tensor] = {}
    step: Callable[..., Any] = TorchPolicy.optimizer_step

    def note(policy: TorchPolicy, *arguments: Any) -> Any:
        grads = [parameter.grad for parameter in policy.model.parameters()]
        noted[policy.name] = torch.cat([grad.flatten() for grad in grads if grad is not None]).clone()
        return step(policy, *arguments)

    monkeypatch.setattr(TorchPolicy, "optimizer_step", note)
    return noted


def test_a_task_has_the_same_gradients_through_a_gateway(
    tmp_path: Path, runs_here: RunsHere, gradients: dict[str, torch.Tensor]
) -> None:
    recipe, tokenizer = tmp_path / "branches", qwen3_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    recipe.mkdir()
    (recipe / "workflow.py").write_text(WORKFLOW)
    architecture = {**ARCHITECTURE, "vocab_size": len(tokenizer), "eos_token_id": "null"}
    written = ", ".join(f"{key}: {value}" for key, value in architecture.items()).lower()
    (recipe / "config.yaml").write_text(
        CONFIG.format(architecture=f"{{{written}}}", tokenizer=tmp_path / "tokenizer")
    )

    def play(name: str, gateway: str) -> tuple[Finished, dict[str, torch.Tensor]]:
        run = runs_here.train(name, f"data.gateway={gateway}", recipe=recipe)
        assert run.status == 0 and not run.problems, run.text
        return run, dict(gradients)

    by_agents, expected = play("agents", "false")
    by_gateway, through = play("gateway", "true")
    assert expected.keys() == through.keys() == {"solver", "critic"}
    for policy, gradient in expected.items():
        assert gradient.norm() > 1e-3, "a gradient of nothing would prove nothing"
        assert (through[policy] - gradient).norm() <= 1e-6 * gradient.norm()
    (step,), (plain,) = by_gateway.metrics, by_agents.metrics
    assert (step["gateway_merged"], step["gateway_branched"]) == (8 * 3, 8)
    assert (step["samples/solver"], step["samples/critic"]) == (8 * 4, 8 * 2)
    for policy in expected:
        assert step[f"merged_share/{policy}"] == plain[f"merged_share/{policy}"] > 0.2
