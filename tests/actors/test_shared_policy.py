"""Two agents on one policy: its gradient is that of one batch with the samples of both, in any order and split.

The real pipeline, store tables and policy, joined by a loop that picks the order of events. The agents are called at
uneven rates and sample at different temperatures.
"""

from collections import Counter
from functools import cache

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import ModelConfig, Sample
from flexmarl.actors.names import AgentName, PolicyName, Step, Version
from flexmarl.actors.orchestrator.decisions import (
    CommitCheckpoint,
    Decision,
    Evaluate,
    Finish,
    Publish,
    Save,
    StartStep,
    StepComplete,
    StepOptimizer,
    Train,
)
from flexmarl.actors.orchestrator.pipeline import Pipeline
from flexmarl.actors.orchestrator.plan import Mode, Plan
from flexmarl.actors.store.schema import Schema
from flexmarl.actors.store.tables import Tables
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.trainer_setup import PolicySetup

from .test_modes_agree import ARCHITECTURE, WRITTEN
from .trainer.algorithm import advantage

AGENTS = (AgentName("sorter"), AgentName("checker"))
TEMPERATURES = {"sorter": 1.0, "checker": 0.7}
SHARED = PolicyName("shared")
QUERIES, TRAJECTORIES = 4, 3


def policy() -> TorchPolicy:
    setup = PolicySetup(
        model=ModelConfig(config=ARCHITECTURE, tokenizer="unused"),
        credit={agent: CreditConfig() for agent in AGENTS},
    )
    return TorchPolicy(SHARED, setup, seed=0, total_steps=2)


def group(step: int, query: int, seed: int) -> list[Sample]:
    """One query's samples: a trajectory calls the sorter one to four times, the checker at most once."""
    random = np.random.default_rng((seed, step, query))
    rewards = {agent: tuple(random.integers(0, 3, TRAJECTORIES).astype(float).tolist()) for agent in AGENTS}
    samples = []
    for trajectory in range(TRAJECTORIES):
        calls = [AGENTS[0]] * random.integers(1, 5) + [AGENTS[1]] * random.integers(0, 2)
        for turn, agent in enumerate(calls):
            tokens = tuple(random.integers(0, 16, random.integers(1, 9)).tolist())
            samples.append(
                Sample(
                    sample_id=f"{step}:q{query}_{turn}_{trajectory}", agent=agent, step=step,
                    policy_version=step - 1, group=f"{step}:q{query}",
                    reward=rewards[agent][trajectory],
                    advantage=advantage(rewards[agent][trajectory], rewards[agent]),
                    prompt_tokens=tuple(random.integers(0, 16, random.integers(1, 6)).tolist()),
                    tokens=tokens, logprobs=tuple((random.normal(-2.7, 0.3, len(tokens))).tolist()),
                    temperature=TEMPERATURES[agent],
                )
            )  # fmt: skip
    return samples


def accumulated(policy: TorchPolicy) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


@cache
def of_one_batch(seed: int) -> torch.Tensor:
    """The gradient of all samples of step 1 in one call, without pipeline and store."""
    alone = policy()
    alone.accumulate([sample for query in range(QUERIES) for sample in group(1, query, seed)])
    return accumulated(alone)


class Run:
    """Two steps. ``data`` picks the next event among those that are possible."""

    def __init__(self, mode: Mode, micro_batch: int, seed: int, data: st.DataObject) -> None:
        self.seed, self.data = seed, data
        self.served = Version(0)
        self.gradients: list[torch.Tensor] = []
        plan = Plan(mode, (SHARED,), Step(1), Step(2), QUERIES, micro_batch)
        self.pipeline = Pipeline(plan, {SHARED: self.served})
        self.tables = Tables(dict.fromkeys(AGENTS, SHARED), {agent: Schema({}) for agent in AGENTS})
        self.tables.begin_epoch()
        self.policy = policy()
        self.open: list[Decision | tuple[Step, Version, int]] = []
        self.samples: dict[str, Sample] = {}
        self.trained: Counter[str] = Counter()

    def run(self) -> None:
        self.take(self.pipeline.start())
        while possible := [n for n in range(len(self.open)) if self.is_possible(n)]:
            self.fire(self.open.pop(self.data.draw(st.sampled_from(possible))))
        assert not self.open, "some work is never done"

    def is_possible(self, number: int) -> bool:
        """A group closes once the policy serves its version; the policy's work is done in order."""
        item = self.open[number]
        if isinstance(item, tuple):
            return item[1] == self.served
        return not any(not isinstance(earlier, tuple) for earlier in self.open[:number])

    def take(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case StartStep(step, versions):
                    self.open += [(step, versions[SHARED], query) for query in range(QUERIES)]
                case StepComplete() | Finish():
                    pass
                case _:
                    self.open.append(decision)

    def fire(self, item: Decision | tuple[Step, Version, int]) -> None:
        match item:
            case (step, _, query):
                self.take(self.pipeline.group_closed(step, {SHARED: self.close(step, query)}))
            case Train(_, step, version, count):
                batch = self.tables.lease(SHARED, version, count, deadline=1.0)
                leased = [self.samples[sample_id] for sample_id in batch.columns["sample_id"]]
                self.policy.accumulate(leased)  # raises StaleSample for another version's sample
                self.trained.update(sample.agent for sample in leased)
                self.take(self.pipeline.trained(SHARED, step, count))
            case StepOptimizer(_, step):
                self.gradients.append(accumulated(self.policy).clone())
                self.policy.optimizer_step()
                self.take(self.pipeline.stepped(SHARED, step))
            case Publish(_, step, version):
                assert version == self.policy.version == step, "one optimizer step for both agents"
                self.served = version
                self.take(self.pipeline.applied(SHARED, step, version))
            case Save(_, step):
                self.take(self.pipeline.saved(SHARED, step))
            case CommitCheckpoint(step, versions):
                assert versions == {SHARED: 2}
                self.take(self.pipeline.committed(step))
            case Evaluate(step):
                self.take(self.pipeline.evaluated(step))

    def close(self, step: Step, query: int) -> int:
        """Puts the group's samples into the agents' tables; returns how many they are."""
        samples = group(step, query, self.seed)
        self.samples |= {sample.sample_id: sample for sample in samples}
        for agent in AGENTS:
            own = [sample for sample in samples if sample.agent == agent]
            if own:
                self.tables.put({agent: {name: [getattr(row, name) for row in own] for name in WRITTEN}})
        return len(samples)


@settings(max_examples=40)
@given(
    mode=st.sampled_from(["strict", "sync"]),
    micro_batch=st.integers(1, 12),
    seed=st.integers(0, 3),
    data=st.data(),
)
def test_its_gradient_is_that_of_one_batch_of_both_agents_samples(
    mode: Mode, micro_batch: int, seed: int, data: st.DataObject
) -> None:
    torch.set_num_threads(1)
    run = Run(mode, micro_batch, seed, data)
    run.run()
    expected = of_one_batch(seed)
    assert expected.norm() > 1e-3, "a gradient of nothing would prove nothing"
    assert (run.gradients[0] - expected).norm() <= 1e-6 * expected.norm()
    assert run.trained == Counter(sample.agent for sample in run.samples.values())
    assert run.trained["sorter"] > run.trained["checker"] > 0, "the agents are called at uneven rates"
    assert len(run.gradients) == 2 and run.policy.version == run.served == 2


def test_the_next_step_waits_for_the_policys_version_and_not_for_an_agents() -> None:
    """All samples of one agent trained is not enough: the version changes once the other's are trained too."""
    plan = Plan("strict", (SHARED,), Step(1), Step(2), queries=2, micro_batch=4)
    pipeline = Pipeline(plan, {SHARED: Version(0)})
    assert pipeline.start() == [StartStep(Step(1), {SHARED: Version(0)})]
    assert pipeline.group_closed(Step(1), {SHARED: 4}) == [Train(SHARED, Step(1), Version(0), 4)]
    assert pipeline.trained(SHARED, Step(1), 4) == []
    rolled_out = pipeline.group_closed(Step(1), {SHARED: 1})
    assert rolled_out == [
        Train(SHARED, Step(1), Version(0), 1),
        StartStep(Step(2), {SHARED: Version(1)}),
    ], "one vector entry for both agents"
    assert pipeline.trained(SHARED, Step(1), 1) == [StepOptimizer(SHARED, Step(1))]
