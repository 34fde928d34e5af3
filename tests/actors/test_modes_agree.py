"""`strict` and `sync` give the same gradient for the same samples, in any order of arrival.

The real pipeline, store table and policy, joined by a loop that closes groups in the order hypothesis picks.
"""

from collections import deque
from functools import cache

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import ModelConfig, Sample
from flexmarl.actors.names import AgentName, PolicyName, Step, Version
from flexmarl.actors.orchestrator.decisions import StepOptimizer, Train
from flexmarl.actors.orchestrator.pipeline import Pipeline
from flexmarl.actors.orchestrator.plan import Mode, Plan
from flexmarl.actors.store.schema import Schema
from flexmarl.actors.store.tables import Tables
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.trainer_setup import PolicySetup

from .stores import policies as own_policies
from .trainer.algorithm import advantage

S = Step
V = Version

AGENTS = ("sorter", "checker")
POLICIES = tuple(map(PolicyName, AGENTS))
QUERIES, TRAJECTORIES = 4, 3
WRITTEN = ("sample_id", "policy_version", "reward")
ARCHITECTURE = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 16,
    "tie_word_embeddings": False, "max_position_embeddings": 32,
}  # fmt: skip


def policy(agent: str) -> TorchPolicy:
    model = ModelConfig(config=ARCHITECTURE, tokenizer="unused")
    return TorchPolicy(
        PolicyName(agent),
        PolicySetup(model=model, credit={AgentName(agent): CreditConfig()}),
        seed=0,
        total_steps=1,
    )


def group(query: int, random: np.random.Generator) -> list[Sample]:
    """One query's samples: a trajectory calls each agent one to three times, answers differ in length."""
    rewards = {agent: tuple(random.integers(0, 3, TRAJECTORIES).astype(float).tolist()) for agent in AGENTS}
    samples = []
    for trajectory in range(TRAJECTORIES):
        for turn, agent in enumerate(a for a in AGENTS for _ in range(random.integers(1, 4))):
            tokens = tuple(random.integers(0, 16, random.integers(1, 9)).tolist())
            samples.append(
                Sample(
                    sample_id=f"1:q{query}_{turn}_{trajectory}", agent=agent, step=1, policy_version=0,
                    group=f"1:q{query}",
                    reward=rewards[agent][trajectory],
                    advantage=advantage(rewards[agent][trajectory], rewards[agent]),
                    prompt_tokens=tuple(random.integers(0, 16, random.integers(1, 6)).tolist()),
                    tokens=tokens, logprobs=tuple((random.normal(-2.7, 0.3, len(tokens))).tolist()),
                )
            )  # fmt: skip
    return samples


def gradient(mode: Mode, arrival: tuple[int, ...], micro_batch: int, seed: int) -> dict[str, torch.Tensor]:
    """Each agent's accumulated gradient, undivided, at the moment its optimizer would step."""
    groups = [group(query, np.random.default_rng((seed, query))) for query in range(QUERIES)]
    plan = Plan(mode, POLICIES, first_step=S(1), last_step=S(1), queries=QUERIES, micro_batch=micro_batch)
    pipeline = Pipeline(plan, dict.fromkeys(POLICIES, V(0)))
    tables = Tables(own_policies(AGENTS), {AgentName(agent): Schema({}) for agent in AGENTS})
    policies = {a: policy(a) for a in AGENTS}
    tables.begin_epoch()
    samples = {sample.sample_id: sample for rows in groups for sample in rows}
    done: dict[str, torch.Tensor] = {}
    pipeline.start()
    for query in arrival:
        counts = dict.fromkeys(POLICIES, 0)
        for agent in POLICIES:
            rows = [sample for sample in groups[query] if sample.agent == agent]
            columns = {name: [getattr(row, name) for row in rows] for name in WRITTEN}
            tables.put({agent: columns})
            counts[agent] = len(rows)
        decisions = deque(pipeline.group_closed(S(1), counts))
        while decisions:
            match decisions.popleft():
                case Train(agent, step, version, count):
                    batch = tables.lease(PolicyName(agent), version, count, deadline=1.0)
                    leased = batch.columns["sample_id"]
                    policies[agent].accumulate([samples[sample_id] for sample_id in leased])
                    decisions += pipeline.trained(agent, step, count)
                case StepOptimizer(agent, _):
                    parameters = policies[agent].model.parameters()
                    done[agent] = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    return done


@cache
def reference(seed: int) -> dict[str, torch.Tensor]:
    """Synchronous, in order, everything in one micro-batch."""
    return gradient("sync", tuple(range(QUERIES)), 1000, seed)


@settings(max_examples=40)
@given(
    mode=st.sampled_from(["strict", "sync"]),
    arrival=st.permutations(range(QUERIES)),
    micro_batch=st.integers(1, 12),
    seed=st.integers(0, 3),
)
def test_the_gradient_is_the_same(mode: Mode, arrival: list[int], micro_batch: int, seed: int) -> None:
    torch.set_num_threads(1)
    expected = reference(seed)
    got = gradient(mode, tuple(arrival), micro_batch, seed)
    assert got.keys() == expected.keys() == set(AGENTS)
    for agent in AGENTS:
        assert expected[agent].norm() > 1e-3, "a gradient of nothing would prove nothing"
        assert (got[agent] - expected[agent]).norm() <= 1e-6 * expected[agent].norm()
