"""When each arrow of a step may fire. Pure: events in, decisions out, no clock and no I/O.

One step of one agent, and who waits for what:

    StartStep ──> groups close ──> Train (micro-batches) ──> StepOptimizer ──> Publish ──> applied
                                   strict: as soon as one     all the step's    the new     by every
                                   micro-batch is there       samples trained   version     instance
                                   sync:   when the whole
                                   step is rolled out

Rules:
- `strict`: a micro-batch is trained as soon as its rows are in the store, while other rollouts of the same step
  still run. `sync`: training begins when every rollout of the step has ended, and the next step when every
  agent has applied its new version.
- An agent's global batch is all its samples of the step's queries, so its size is known, and the optimizer
  may step, only when the step is rolled out. An agent that nobody called in a step keeps its version,
  and is done with the step when it is done with the one before.
- `strict` has a barrier per policy, not per step: step k+1 starts when step k is rolled out; its turns wait,
  each for its own agent's version. Step k+2 does not start before step k is complete for all agents.
- Saving follows an agent's optimizer step before its next micro-batch, so that the saved state is exactly
  the state after that step, whatever the others do.
- An evaluation sees one joint version: the next step waits for it. A run that is asked to stop leaves it out; the
  run that goes on from there begins with it.
- A checkpoint is committed when its step is complete and evaluated, so that a run resumed from it lacks nothing.
"""

from dataclasses import dataclass, field
from typing import Literal

from ...core.errors import ProtocolViolation

Mode = Literal["strict", "sync"]


@dataclass(frozen=True, slots=True)
class StartStep:
    step: int
    versions: dict[str, int]


@dataclass(frozen=True, slots=True)
class Train:
    agent: str
    step: int
    version: int
    count: int


@dataclass(frozen=True, slots=True)
class StepOptimizer:
    agent: str
    step: int


@dataclass(frozen=True, slots=True)
class Publish:
    agent: str
    step: int
    version: int


@dataclass(frozen=True, slots=True)
class Save:
    agent: str
    step: int


@dataclass(frozen=True, slots=True)
class StepComplete:
    """Every agent has applied the version that follows the step. ``evaluated``: an evaluation comes next."""

    step: int
    evaluated: bool


@dataclass(frozen=True, slots=True)
class CommitCheckpoint:
    """Every agent has saved its state after ``step``, at ``versions``, and the step is complete and evaluated."""

    step: int
    versions: dict[str, int]


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Of the joint version after ``step``."""

    step: int
    versions: dict[str, int]


@dataclass(frozen=True, slots=True)
class Finish:
    last_step: int


Decision = (
    StartStep | Train | StepOptimizer | Publish | Save | StepComplete | CommitCheckpoint | Evaluate | Finish
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the run is to do: steps ``first_step ... last_step``, ``queries`` groups each.

    ``save_every`` and ``evaluate_every`` are in steps, 0 for never; the last step is saved and evaluated always.
    """

    mode: Mode
    agents: tuple[str, ...]
    first_step: int
    last_step: int
    queries: int
    micro_batch: int
    save_every: int = 0
    evaluate_every: int = 0
    evaluate_first: bool = False


@dataclass(slots=True)
class _AgentStep:
    """One agent's samples of one step, and how far they have come."""

    version: int
    closed: int = 0
    sent: int = 0
    trained: int = 0
    optimizing: bool = False
    stepped: bool = False
    done: bool = False


@dataclass(slots=True)
class _Step:
    agents: dict[str, _AgentStep]
    groups_closed: int = 0
    rolled_out: bool = False
    awaits_evaluation: bool = False
    save_asked: set[str] = field(default_factory=set)
    saved: set[str] = field(default_factory=set)
    committing: bool = False
    committed: bool = False

    @property
    def next_versions(self) -> dict[str, int]:
        """What follows the step; known once it is rolled out, since then it is known who steps."""
        return {agent: state.version + (state.closed > 0) for agent, state in self.agents.items()}

    @property
    def complete(self) -> bool:
        return all(state.done for state in self.agents.values())

    @property
    def unsaved(self) -> bool:
        return bool(self.save_asked) and not self.committed

    @property
    def may_be_committed(self) -> bool:
        all_saved = len(self.saved) == len(self.agents)
        return all_saved and self.complete and not self.awaits_evaluation and not self.committing


class Pipeline:
    def __init__(self, plan: Plan, versions: dict[str, int]) -> None:
        """``versions``: what the instances of each agent serve when the run begins."""
        self._plan = plan
        self._versions = dict(versions)
        self._last_step = plan.last_step
        self._steps: dict[int, _Step] = {}
        self._next_step = plan.first_step
        self._evaluating = False
        self._evaluated = plan.first_step - 1 if not plan.evaluate_first else plan.first_step - 2
        self._finished = False

    # ------------------------------------------------------------------ events

    def start(self) -> list[Decision]:
        return self._advance()

    def request_stop(self) -> list[Decision]:
        """No step is started any more; those under way end, and the last of them is saved."""
        self._last_step = min(self._last_step, self._next_step - 1)
        decisions: list[Decision] = []
        if (step := self._steps.get(self._last_step)) is not None:
            # Agents that have stepped already can't have begun another step: their state is still this step's.
            for agent, state in step.agents.items():
                if state.stepped:
                    decisions += self._save(self._last_step, agent)
        return decisions + self._advance()

    def group_closed(self, step: int, samples: dict[str, int]) -> list[Decision]:
        state = self._step(step)
        if state.rolled_out:
            raise ProtocolViolation(f"step {step} had {self._plan.queries} groups already")
        state.groups_closed += 1
        state.rolled_out = state.groups_closed == self._plan.queries
        for agent, count in samples.items():
            state.agents[agent].closed += count
        decisions: list[Decision] = []
        for agent in state.agents:
            decisions += self._feed(step, agent)
        return decisions + (self._advance() if state.rolled_out else [])

    def trained(self, agent: str, step: int, count: int) -> list[Decision]:
        state = self._step(step).agents[agent]
        state.trained += count
        if state.trained > state.sent:
            raise ProtocolViolation(f"{agent}: {state.trained} samples trained, {state.sent} sent")
        return self._feed(step, agent)

    def stepped(self, agent: str, step: int) -> list[Decision]:
        state = self._step(step).agents[agent]
        if not state.optimizing:
            raise ProtocolViolation(f"{agent} stepped although step {step} did not ask it to")
        state.stepped = True
        return [Publish(agent, step, state.version + 1), *self._save(step, agent)]

    def applied(self, agent: str, step: int, version: int) -> list[Decision]:
        state = self._step(step).agents[agent]
        if version != state.version + 1:
            raise ProtocolViolation(f"{agent} applied version {version} after {state.version}")
        self._versions[agent] = version
        return self._agent_done(step, agent)

    def saved(self, agent: str, step: int) -> list[Decision]:
        state = self._step(step)
        state.saved.add(agent)
        return self._advance()

    def committed(self, step: int) -> list[Decision]:
        self._step(step).committed = True
        return self._advance()

    def evaluated(self, step: int) -> list[Decision]:
        self._evaluating = False
        self._evaluated = step
        if (state := self._steps.get(step)) is not None:
            state.awaits_evaluation = False
        return self._advance()

    # ------------------------------------------------------------------ decisions

    def _feed(self, step: int, agent: str) -> list[Decision]:
        """The micro-batches that an agent may train now, and its optimizer step once all are trained."""
        whole, state = self._steps[step], self._steps[step].agents[agent]
        decisions: list[Decision] = []
        if self._plan.mode == "sync" and not whole.rolled_out:
            return decisions
        size = self._plan.micro_batch
        while state.closed - state.sent >= size or (whole.rolled_out and state.closed > state.sent):
            count = min(size, state.closed - state.sent)
            state.sent += count
            decisions.append(Train(agent, step, state.version, count))
        if whole.rolled_out and not state.optimizing and not state.done:
            if state.closed == 0 and self._is_done(step - 1, agent):
                state.stepped = True
                decisions += [*self._save(step, agent), *self._agent_done(step, agent)]
            elif state.closed and state.trained == state.closed:
                state.optimizing = True
                decisions.append(StepOptimizer(agent, step))
        return decisions

    def _save(self, step: int, agent: str) -> list[Decision]:
        every, asked = self._plan.save_every, self._steps[step].save_asked
        wanted = step == self._last_step or bool(every and step % every == 0)
        if not wanted or agent in asked:
            return []
        asked.add(agent)
        return [Save(agent, step)]

    def _agent_done(self, step: int, agent: str) -> list[Decision]:
        whole = self._steps[step]
        whole.agents[agent].done = True
        decisions: list[Decision] = []
        if whole.complete:
            whole.awaits_evaluation = self._is_evaluated(step)
            decisions.append(StepComplete(step, whole.awaits_evaluation))
        if step + 1 in self._steps:  # where the agent has no samples, it waited for this
            decisions += self._feed(step + 1, agent)
        return decisions + self._advance()

    def _is_done(self, step: int, agent: str) -> bool:
        return step not in self._steps or self._steps[step].agents[agent].done

    def _advance(self) -> list[Decision]:
        """What becomes possible between steps: committing, evaluating, starting the next, finishing."""
        decisions: list[Decision] = []
        for number, step in list(self._steps.items()):
            if step.may_be_committed:
                step.committing = True
                decisions.append(CommitCheckpoint(number, step.next_versions))
            if step.complete and not step.unsaved and number < self._next_step - 1:
                del self._steps[number]
        if self._evaluating or self._finished:
            return decisions
        last = self._next_step - 1
        done = all(step.complete for step in self._steps.values())
        if done and self._is_evaluated(last) and self._evaluated < last:
            self._evaluating = True
            return [*decisions, Evaluate(last, dict(self._versions))]
        if self._next_step <= self._last_step:
            if self._may_start():
                decisions.append(self._begin())
        elif done and not any(step.unsaved for step in self._steps.values()):
            self._finished = True
            decisions.append(Finish(last))
        return decisions

    def _may_start(self) -> bool:
        last = self._next_step - 1
        if self._is_evaluated(last) and self._evaluated < last:
            return False
        before = self._steps.get(last)
        if before is None:
            return True
        earlier_done = all(step.complete for number, step in self._steps.items() if number < last)
        return before.complete or (self._plan.mode == "strict" and before.rolled_out and earlier_done)

    def _begin(self) -> StartStep:
        before = self._steps.get(self._next_step - 1)
        versions = dict(self._versions) if before is None else before.next_versions
        number = self._next_step
        self._next_step += 1
        self._steps[number] = _Step({agent: _AgentStep(versions[agent]) for agent in self._plan.agents})
        return StartStep(number, versions)

    def _is_evaluated(self, step: int) -> bool:
        every = self._plan.evaluate_every
        if self._last_step < self._plan.last_step:  # asked to stop: soon, then
            return False
        if step < self._plan.first_step:
            return self._plan.evaluate_first
        return step == self._plan.last_step or bool(every and step % every == 0)

    def _step(self, number: int) -> _Step:
        step = self._steps.get(number)
        if step is None:
            raise ProtocolViolation(f"step {number} is not under way")
        return step
