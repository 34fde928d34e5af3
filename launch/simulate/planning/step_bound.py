"""A bound of a step: seconds that a run with these numbers can't do without. Pure, and far faster than a simulation.

    rollouts    the longer of all turns on instances that are always full, and the slowest trajectory, whose
                sequences have their instances for themselves
    training    the longer of the slowest policy, and the work of all ranks on slots that always compute
    a step      strict: the rollouts, a micro-batch, an optimizer step and new weights, or the training if that is
                longer; sync: rollouts and training; async: the longer of the two

It has the means of the lengths, so that it is a bound of long runs: a step with short answers may be below it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ....actors.inference.engine_times import EngineTimes
from ....actors.names import AgentName, PolicyName
from ....actors.orchestrator.plan import Mode
from ....actors.trainer.backends.trainer_times import TrainerTimes
from ..workload_config import CallConfig, DelayConfig, LengthsConfig, WorkloadConfig
from .candidates import Candidate, moves

Numbers = npt.NDArray[np.float64]

_STEPS: Final = 32  # that are drawn for the slowest trajectory of a step
_SEED: Final = 1


@dataclass(frozen=True, slots=True)
class DrawnCall:
    """A call of a stage, by trajectory: ``tokens`` of its answers and ``prompts``, in sum; ``turns``; ``delay_s``."""

    agent: AgentName
    turns: Numbers
    prompts: Numbers
    tokens: Numbers
    delay_s: Numbers


@dataclass(frozen=True, slots=True)
class DrawnWorkload:
    """The trajectories of many steps. Arrays have a row for each step."""

    stages: Sequence[Sequence[DrawnCall]]
    reward_s: Numbers

    def turns(self, agents: Sequence[AgentName]) -> float:
        """Turns of a step, the mean."""
        return sum(float(call.turns.sum()) / len(call.turns) for call in self._calls(agents))

    def mean(self, agents: Sequence[AgentName], of: str) -> float:
        """The mean of a turn: of ``tokens`` or ``prompts``."""
        sums: list[float] = [float(getattr(call, of).sum()) / len(call.turns) for call in self._calls(agents)]
        return sum(sums) / max(1e-9, self.turns(agents))

    def _calls(self, agents: Sequence[AgentName]) -> list[DrawnCall]:
        return [call for stage in self.stages for call in stage if call.agent in agents]


def draw_workload(
    workload: WorkloadConfig, trajectories: int, longest: Mapping[AgentName, int]
) -> DrawnWorkload:
    """``trajectories``: of a step. ``longest``: ``max_new_tokens`` of each agent."""
    draw = _Draw(trajectories)
    stages = [[draw.call(workload, call, longest) for call in stage] for stage in workload.calls]
    return DrawnWorkload(stages, draw.delay(workload.reward))


class _Draw:
    """Draws have the quantiles of their distribution at equal distances, in a random order: their means are exact, as
    far as the tails reach."""

    def __init__(self, trajectories: int) -> None:
        self._shape = (_STEPS, trajectories)
        count = _STEPS * trajectories
        normal = NormalDist()
        self._quantiles = np.array([normal.inv_cdf((n + 0.5) / count) for n in range(count)])
        self._random = np.random.default_rng(_SEED)

    def call(self, workload: WorkloadConfig, call: CallConfig, longest: Mapping[AgentName, int]) -> DrawnCall:
        lengths = workload.agents[call.agent]
        is_called = (self._random.random(self._shape) < call.chance).astype(np.float64)
        tokens = self._sum(call.times, lengths.answer, longest[call.agent])
        prompts = self._sum(call.times, lengths.prompt, lengths.prompt.most)
        delay_s = sum((self.delay(workload.environment) for _ in range(call.times)), np.zeros(self._shape))
        return DrawnCall(
            call.agent, call.times * is_called, is_called * prompts, is_called * tokens, is_called * delay_s
        )

    def delay(self, delay: DelayConfig | None) -> Numbers:
        return np.zeros(self._shape) if delay is None else self._lognormal(delay.median_s, delay.sigma)

    def _sum(self, times: int, lengths: LengthsConfig, most: int) -> Numbers:
        draws = (self._lognormal(lengths.median, lengths.sigma) for _ in range(times))
        return sum((np.clip(np.round(one_call), 1, most) for one_call in draws), np.zeros(self._shape))

    def _lognormal(self, median: float, sigma: float) -> Numbers:
        values: Numbers = median * np.exp(sigma * self._random.permutation(self._quantiles))
        return values.reshape(self._shape)


@dataclass(frozen=True, slots=True)
class PolicyWork:
    """A policy's turns in a step, and their means. ``max_batch``: of its engine. ``is_trained``: False if frozen.
    ``computed``: part of the prompts' tokens that engines compute."""

    turns: float
    prompt: float
    answer: float
    max_batch: int
    is_trained: bool
    computed: float = 1.0

    def turn_s(self, times: EngineTimes, at_once: float) -> float:
        """Seconds that a turn takes of an instance that is as full as it can be. ``at_once``: turns of the policy."""
        room = np.inf if times.room_tokens is None else times.room_tokens / (self.prompt + self.answer)
        batch = max(1, int(min(self.max_batch, room, at_once)))
        context = batch * (self.prompt + self.answer / 2)
        prompt_s = times.prefill_s([round(self.prompt) * self.computed] * batch, batch) / batch
        return (self.answer - times.prompt_gives_token) * times.decode_s(batch, context) / batch + prompt_s


@dataclass(frozen=True, slots=True)
class StepBound:
    """Seconds: of a step, and the parts of which it is made."""

    step_s: float
    instances_s: float
    slowest_trajectory_s: float
    training_s: float


@dataclass(frozen=True, slots=True)
class BoundModel:
    """The times of all numbers that a candidate may have. ``engines``: by policy and devices of an instance;
    ``trainers``: by policy and ranks. ``installs``, ``publishes``, ``resumes``: seconds of transfers that have all
    links for themselves; by the keys of ``engines``, by policy, by the keys of ``trainers``. ``agents``: by policy."""

    mode: Mode
    work: Mapping[PolicyName, PolicyWork]
    agents: Mapping[PolicyName, Sequence[AgentName]]
    drawn: DrawnWorkload
    engines: Mapping[tuple[PolicyName, int], EngineTimes]
    installs: Mapping[tuple[PolicyName, int], float]
    publishes: Mapping[PolicyName, float]
    resumes: Mapping[tuple[PolicyName, int], float]
    trainers: Mapping[tuple[PolicyName, int], TrainerTimes]
    # The slowest trajectory depends on the devices of instances alone, of which many candidates have the same.
    slowest: dict[Any, float]

    def bound(self, candidate: Candidate) -> StepBound:
        """See the head of the file."""
        instances_s = self._instances_s(candidate)
        sizes = candidate.tensor_parallel
        if sizes not in self.slowest:
            self.slowest[sizes] = self._slowest_s(sizes)
        rollout_s = max(instances_s, self.slowest[sizes])
        training_s, last_s = self._training_s(candidate)
        match self.mode:
            case "sync":
                step_s = rollout_s + training_s + last_s
            case "strict":
                step_s = max(rollout_s + last_s, training_s)
            case "async":
                step_s = max(rollout_s, training_s)
        return StepBound(step_s, instances_s, self.slowest[sizes], training_s)

    def _instances_s(self, candidate: Candidate) -> float:
        counts, sizes = dict(candidate.instances), dict(candidate.tensor_parallel)
        whole_s = {
            name: work.turns * work.turn_s(self.engines[name, sizes[name]], work.turns)
            for name, work in self.work.items()
        }
        if moves(candidate.balance):
            return sum(whole_s.values()) / sum(counts.values())
        return max(seconds / counts[name] for name, seconds in whole_s.items())

    def _slowest_s(self, sizes: Sequence[tuple[PolicyName, int]]) -> float:
        """The mean over the steps of their slowest trajectory's time."""
        widths, whole_s = dict(sizes), self.drawn.reward_s.copy()
        policies = {agent: name for name, agents in self.agents.items() for agent in agents}
        for stage in self.drawn.stages:
            calls_s: list[Numbers] = []
            for call in stage:
                name = policies[call.agent]
                times = self.engines[name, widths[name]]
                token_s = times.decode_s(1, self.work[name].prompt)
                steps = call.tokens - call.turns * times.prompt_gives_token
                calls_s.append(call.delay_s + steps * token_s)
            whole_s += np.max(calls_s, axis=0)
        return float(whole_s.max(axis=1).mean())

    def _training_s(self, candidate: Candidate) -> tuple[float, float]:
        """Seconds of a step, and the least that follows the last rollout of a policy."""
        whole_s, last_s, occupied = [0.0], [], 0.0
        sizes, ranks = dict(candidate.tensor_parallel), dict(candidate.ranks)
        excess = max(0.0, 1 - candidate.slots / max(1, sum(ranks.values())))
        for name, count in ranks.items():
            work, times = self.work[name], self.trainers[name, count]
            length = round(work.prompt + work.answer)
            batch_s = times.micro_batch_s([length] * candidate.micro_batch, count)
            policy_s = work.turns / candidate.micro_batch * batch_s + times.optimizer_s
            whole_s.append(policy_s)
            # Of the policies that have no slots left over, each is resumed at least once in a step.
            occupied += count * (policy_s + excess * self.resumes[name, count])
            moves_s = self.publishes[name] + self.installs[name, sizes[name]]
            last_s.append(batch_s + times.optimizer_s + moves_s)
        slots_s = occupied / candidate.slots if candidate.slots else 0.0
        return max(slots_s, *whole_s), min(last_s, default=0.0)
