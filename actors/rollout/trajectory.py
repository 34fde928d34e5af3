"""One run of the workflow on one query: its name, its deadline, its turns."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ..columns.declared_columns import Columns
from ..deadline import Deadline
from ..demonstrations.demonstration import Demonstration
from ..environments.tree_play import TreeEnd
from ..errors import InvalidColumn, InvalidReward, RecipeError
from ..expert_routes import routes_column
from ..figures import Numbers
from ..gateway.trajectory_programs import TrajectoryPrograms
from ..messages import (
    AgentTurns,
    AnsweredTrajectory,
    AnsweredTurn,
    LoggedTrajectory,
    LoggedTurn,
    Query,
    Sample,
    VersionRange,
)
from ..names import AgentName, PolicyName, Step, Version
from ..recipe.recipe_lines import innermost_frames
from ..recorded_trajectory import PromptPart
from ..sample_id import SampleId, TrajectoryName, turn_of
from ..trees.branch_rule import BranchRule
from ..trees.success_model import SuccessModel
from ..workflow import Rewards
from .call_graph import TimedTurn
from .resumable_turn import ResumableTurn
from .trajectory_rewards import Amounts, EndedTurn, TrajectoryRewards
from .turn_columns import TurnColumns


class Trajectory:
    """``step``: None for an evaluation. ``temperature``: of all agents' turns; None: each agent's own. ``versions``:
    may generate its turns, by policy; if that is more than one, a trajectory and even a turn may begin with one version
    and continue with a later one: every token keeps its own. ``rewards``: once it has ended."""

    def __init__(
        self,
        query: Query,
        step: Step | None,
        number: int,
        versions: Mapping[PolicyName, VersionRange],
        temperature: float | None = None,
    ) -> None:
        self.query = query
        self.number = number
        self.versions = versions
        self.temperature = temperature
        self.is_evaluation = step is None
        self.is_exploration = False
        """True if it only chooses which trajectories are played again: it never leaves a sample."""
        self.name = str(TrajectoryName(step, query.id, number))
        self.rewards = TrajectoryRewards()
        self.first_turn_at = math.inf
        self.deadline: Deadline | None = None
        self.step = step
        self._group = self._sample_id(0).group
        self._turns: list[tuple[AgentName, ResumableTurn]] = []
        self._begun: dict[AgentName, int] = {}
        self.timed_turns: list[TimedTurn] = []
        """Times of the turns that have ended."""
        self._columns: dict[str, TurnColumns] = {}
        self._prompts: dict[str, tuple[PromptPart, ...]] = {}
        self._ended_tokens: dict[AgentName, int] = {}
        self._queue_s: defaultdict[AgentName, float] = defaultdict(float)
        self._service_s: defaultdict[AgentName, float] = defaultdict(float)
        self.retried_turns = 0
        self.turns_open = 0
        """Turns under way."""
        self.services_open = 0
        """Calls of outside services under way."""
        self.service_figures: Numbers = {}
        """Figures of those that have ended, and of its demonstration, by their names in ``figures.py``."""
        self.judge_limit = ""
        """The settings that end its wait for rewards from outside the run; empty while it waits for none."""
        self.awaits_rewards: Callable[[], None] = lambda: None
        """Called when its workflow has returned, and rewards from outside are missing."""
        self.leaves_out_late = False
        """True if it is late, and no failure, when those are not there in time."""
        self.is_session = False
        """True if a program outside the run plays it, and no workflow."""
        self.active_at = asyncio.get_running_loop().time()
        """The time at which its last turn began or ended, or its workflow returned."""
        self.environment_s = 0.0
        """Seconds before and between its turns, in which none was under way."""
        self.reward_s = 0.0
        """Seconds from its last turn until its rewards were there."""
        self.programs = TrajectoryPrograms()
        self.left_out: frozenset[str] = frozenset()
        """The ids of samples that are not trained; final when its workflow has returned."""
        self.limited = False
        """True once an agent was asked for a turn beyond a limit."""
        self.rule: BranchRule | None = None
        """The rule of its branches; None: it has none."""
        self.model: SuccessModel | None = None
        """Predicts the success of its prefixes, if the rule asks for it."""
        self.demonstration: Demonstration | None = None
        """That it follows; None: its turns are the policy's alone."""
        self.tree: TreeEnd | None = None
        """Once its workflow has returned: the lines of a trajectory that could branch."""
        self._overran: list[tuple[AgentName, BaseException]] = []
        self._id_count = 0
        self._closed = False

    def next_sample_id(self) -> str:
        """The id of a new turn. Raises RecipeError once the workflow has returned."""
        if self._closed:
            raise RecipeError(f"trajectory {self.name}: the workflow asked for a turn after it had returned")
        self._id_count += 1
        return str(self._sample_id(self._id_count - 1))

    def _sample_id(self, turn: int) -> SampleId:
        return SampleId(self.step, self.query.id, turn, self.number)

    def begin_turn(self, agent: AgentName) -> int:
        """The number of the agent's new turn, from 0."""
        number = self._begun.get(agent, 0)
        self._begun[agent] = number + 1
        return number

    def add_turn(self, agent: AgentName, turn: ResumableTurn, timed: TimedTurn) -> None:
        """Adds a turn that has ended. One that ends after its workflow has returned is not part of the trajectory."""
        if not self._closed:
            self._turns.append((agent, turn))
            if turn.request.constraint is not None:
                self.programs.left_out.add(turn.request.sample_id)
            self._ended_tokens[agent] = self._ended_tokens.get(agent, 0) + len(turn.tokens)
            self.timed_turns.append(timed)

    def add_times(self, agent: AgentName, queue_s: float, service_s: float) -> None:
        """Adds the seconds of a turn, or a part of one, that waited for room and was at an instance."""
        self._queue_s[agent] += queue_s
        self._service_s[agent] += service_s

    def add_figures(self, figures: Mapping[str, float]) -> None:
        """Adds figures of the trajectory, as those of a call of an outside service that has ended."""
        for name, value in figures.items():
            self.service_figures[name] = self.service_figures.get(name, 0) + value

    def used(self, agent: AgentName | None) -> tuple[int, int]:
        """Returns the number of turns of ``agent`` that have begun, and of tokens in turns that have ended; None: of
        all agents."""
        if agent is None:
            return sum(self._begun.values()), sum(self._ended_tokens.values())
        return self._begun.get(agent, 0), self._ended_tokens.get(agent, 0)

    def columns_of(self, agent: AgentName, sample_id: str, declared: Columns) -> TurnColumns:
        """The columns of a turn that the workflow may write."""
        columns = TurnColumns(agent, sample_id, declared, lambda: self._closed)
        self._columns[sample_id] = columns
        return columns

    def note_prompt(self, sample_id: str, prompt: tuple[PromptPart, ...]) -> None:
        """Notes the prompt of a turn, for ``ended_turns``."""
        self._prompts[sample_id] = prompt

    def ended_turns(
        self,
    ) -> Iterator[tuple[AgentName, ResumableTurn, tuple[PromptPart, ...], Mapping[str, Any]]]:
        """Its turns that have ended: agent, turn, noted prompt, and the columns that the workflow wrote."""
        for agent, turn in self._turns:
            sample_id = turn.request.sample_id
            yield agent, turn, self._prompts.get(sample_id, ()), self._columns[sample_id].values

    def check_columns(self) -> None:
        """Raises InvalidColumn if the workflow has left out a required one."""
        for agent, turn in self._turns:
            sample_id = turn.request.sample_id
            if missing := self._columns[sample_id].missing():
                raise InvalidColumn(
                    f"agent {agent}: the workflow has not written {', '.join(missing)} of turn {sample_id}, which "
                    f"agents.{agent}.columns.{missing[0]}.required demands: Turn.write before it returns"
                )

    def close(self) -> None:
        """Ends the trajectory: its turns are those that have ended."""
        self._closed = True

    def leave_out(self, returned: object) -> None:
        """Leaves the turns out of the samples that the workflow or the rules of its gateways leave out, and those with
        a constraint; of a tree also those that no line with rewards holds. ``returned``: by the workflow. Raises
        InvalidReward for one of another trajectory."""
        sample_ids = {turn.request.sample_id for _, turn in self._turns}
        all_rewards: Sequence[object] = [returned]
        ids = self.programs.left_out & sample_ids
        if isinstance(returned, TreeEnd):
            self.tree = returned
            # By number, not by arrival: sums of floats and rows are in the same order in every run.
            self._turns.sort(key=lambda ended: turn_of(ended[1].request.sample_id))
            all_rewards = [end.rewards for end in returned.ends]
            ids |= sample_ids.difference(*(end.sample_ids for end in returned.ends))
        for rewards in all_rewards:
            for turn in rewards.left_out if isinstance(rewards, Rewards) else []:
                if turn.sample_id not in sample_ids:
                    raise InvalidReward(
                        f"agent {turn.agent!r}: turn {turn.sample_id} is left out, and is not of trajectory {self.name}"
                    )
                ids |= {turn.sample_id}
        self.left_out = frozenset(ids)

    def turns_of(self, agent: AgentName) -> AgentTurns:
        """The figures of the agent's turns that have ended, and their lengths in tokens."""
        turns = [turn for of_agent, turn in self._turns if of_agent == agent]
        lengths = tuple(len(turn.tokens) for turn in turns)
        truncated = sum(turn.truncated for turn in turns)
        counts = {"turns": len(turns), "tokens": sum(lengths), "truncated_turns": truncated}
        seconds = {"queue_s": self._queue_s[agent], "service_s": self._service_s[agent]}
        return AgentTurns({**counts, **seconds}, lengths)

    def oldest_versions(self) -> dict[AgentName, Version]:
        """By agent: the oldest version of its turns that have ended."""
        oldest: dict[AgentName, Version] = {}
        for agent, turn in self._turns:
            oldest[agent] = min(oldest.get(agent, turn.policy_version), turn.policy_version)
        return oldest

    def turns_to_reward(self) -> list[EndedTurn]:
        """Its turns that have ended, in the order of their ends."""
        return [EndedTurn(agent, turn.request.sample_id, len(turn.tokens)) for agent, turn in self._turns]

    def endings(self) -> dict[str, tuple[str, bool]]:
        """By id: the text of each turn that has ended, and true if it ended at its greatest length."""
        return {turn.request.sample_id: (turn.text, turn.truncated) for _, turn in self._turns}

    def answer(self) -> AnsweredTrajectory:
        """The trajectory for the program that has submitted its query; without rewards before it has ended."""
        rewards = self.rewards.before_punishment
        turns = [
            AnsweredTurn(
                agent,
                turn.request.sample_id,
                turn.text,
                turn.policy_version,
                rewards.by_sample.get(turn.request.sample_id),
            )
            for agent, turn in sorted(self._turns, key=lambda ended: turn_of(ended[1].request.sample_id))
        ]
        of_turns = {agent: sum(amounts) for agent, amounts in self.rewards.of_turns.items()}
        return AnsweredTrajectory({**of_turns, **rewards.by_agent}, dict(self.rewards.metrics), turns)

    def logged(self, agents: Collection[AgentName]) -> LoggedTrajectory | None:
        """The trajectory as one that may come again, with its turns of ``agents``, those that are trained. None if a
        turn is not trained, or was drawn from a truncated distribution, whose log-probabilities a logged turn does not
        have."""
        turns = [(agent, turn) for agent, turn in self._turns if agent in agents]
        if self.left_out or any(turn.request.truncation is not None for _, turn in turns):
            return None
        rewards = self.rewards.before_punishment.by_agent
        return LoggedTrajectory(
            [
                LoggedTurn(
                    agent,
                    [],
                    turn.text,
                    turn.prompt_tokens,
                    turn.tokens,
                    turn.logprobs,
                    turn.request.temperature,
                    turn.policy_version,
                )
                for agent, turn in sorted(turns, key=lambda ended: turn_of(ended[1].request.sample_id))
            ],
            {agent: rewards[agent] for agent in {agent for agent, _ in turns}},
        )

    def prefix(self, prompt: tuple[str | tuple[int, ...], ...]) -> str:
        """Names the beginning of a prompt: that of its conversation if it has turns, else that of its group."""
        for part in prompt:
            if isinstance(part, tuple):
                return self.name
        return self._group

    def turn_overran(self, agent: AgentName, error: BaseException) -> None:
        """Notes that a turn passed its deadline; the workflow gets ``error``."""
        self._overran.append((agent, error))

    def agent_that_overran(self, error: BaseException) -> AgentName | None:
        """The agent of the turn whose deadline ended the workflow with ``error``; None if the error is another one."""
        inner = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
        return next((agent for agent, raised in self._overran if raised in inner), None)

    @property
    def has_overrun(self) -> bool:
        """True once its deadline has passed."""
        overran = None if self.deadline is None else self.deadline.overran
        return overran is not None and overran.done() and not overran.cancelled()

    def turn_begins(self, now: float) -> None:
        """Notes that a turn goes to an instance at ``now``, in seconds of the system's clock."""
        self.first_turn_at = min(self.first_turn_at, now)

    def samples(
        self,
        step: Step,
        query_position: int,
        agents: Collection[AgentName],
        rewards: Amounts,
    ) -> list[Sample]:
        """Its turns as rows, those of ``agents``, without an advantage: its group gives it to them. ``rewards``: its
        own, used or given."""
        assert not self.is_exploration, "explorers generate with other weights than those that are trained"
        return [
            Sample(
                sample_id=turn.request.sample_id,
                agent=agent,
                step=step,
                policy_version=turn.policy_version,
                group=self._group,
                reward=rewards.by_sample[turn.request.sample_id],
                advantage=0.0,
                prompt_tokens=turn.prompt_tokens,
                tokens=turn.tokens,
                logprobs=turn.logprobs,
                query_position=query_position,
                version_changes=turn.version_changes,
                temperature=turn.request.temperature,
                truncation=turn.request.truncation,
                columns=self._columns[turn.request.sample_id].values | routes_column(turn.routes),
            )
            for agent, turn in self._turns
            if agent in agents and turn.request.sample_id not in self.left_out
        ]


def where_it_hangs(folder: Path, task: "asyncio.Task[Any]") -> TimeoutError:
    """An error whose traceback shows the frames in which a suspended task waits. ``folder``: the recipe's."""
    traceback: TracebackType | None = None
    for frame in reversed(innermost_frames(folder, task)):
        traceback = TracebackType(traceback, frame, frame.f_lasti, frame.f_lineno)
    return TimeoutError("hangs here").with_traceback(traceback)
