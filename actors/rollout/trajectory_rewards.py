"""The reward of each sample of a trajectory, from the rewards that its workflow has returned. Pure.

    sample's reward = agent's own + team_weight * team's + turn's own        rewards: both
                    = agent's own + team_weight * team's                     rewards: trajectory
                    = turn's own                                             rewards: turn

``both`` is AT-GRPO's mixture ``r = alpha r_team + r_local`` (Zhao et al., arXiv 2510.11062, section 4.2).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from ...core.base.texts import guess
from ..columns.declared_columns import outside_reward
from ..errors import InvalidReward, RecipeError
from ..names import AgentName
from ..recipe.missing_await import await_hint
from ..workflow import Rewards
from .overlong import overlong_punishment, punish_overlong
from .rollout_setup import RolloutAgent

Agents = Mapping[AgentName, RolloutAgent]
_NONE: Final[Mapping[str, float]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """``tokens``: generated ones."""

    agent: AgentName
    sample_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Amounts:
    """``by_agent``: of the trajectory, the team's share included; ``by_sample``: of each turn, by sample id."""

    by_agent: dict[AgentName, float] = field(default_factory=dict)
    by_sample: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrajectoryRewards:
    """``before_punishment``: as the workflow gave them; ``used``: less the overlong punishment, for training.
    ``of_turns``: by agent, those that single turns were given. ``metrics``: the workflow's own."""

    before_punishment: Amounts = field(default_factory=Amounts)
    used: Amounts = field(default_factory=Amounts)
    of_turns: dict[AgentName, list[float]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def trajectory_rewards(
    trajectory: str,
    returned: object,
    turns: Sequence[EndedTurn],
    agents: Agents,
    *,
    punish: bool,
    outside: Mapping[str, float] = _NONE,
    left_out: Collection[str] = (),
) -> TrajectoryRewards:
    """``returned``: what the workflow has; closed. ``punish``: lower the rewards of turns that are too long.
    ``outside``: by sample id, the rewards that a program outside the run gave: they take the place of the workflow's,
    which may return None. ``left_out``: the ids of samples that are not trained, and have no reward.

    Raises RecipeError, which ends the run, for another type, an unknown agent, a trained agent with turns and without a
    reward, and a turn's reward that its agent's algorithm does not use; InvalidReward, which fails the trajectory, for
    a value that ``Rewards.checked`` refuses and a turn that is not of this trajectory.
    """
    if returned is None and outside:
        returned = Rewards()
    if not isinstance(returned, Rewards):
        raise RecipeError(
            f"the workflow returned {type(returned).__name__}, not Rewards{await_hint(returned)}"
        )
    for agent in returned.by_agent:
        if agent not in agents:
            raise unknown_agent(agent, agents, "the workflow rewards")
    returned.close()
    rewards = returned.checked()
    turn_amounts = _turn_rewards(trajectory, rewards, turns, agents)
    if left_out:
        turns = [turn for turn in turns if turn.sample_id not in left_out]
        turn_amounts = {name: amount for name, amount in turn_amounts.items() if name not in left_out}
    _take_outside(rewards, turn_amounts, turns, agents, outside)
    if rewards.team is None:
        _refuse_unrewarded(rewards, turn_amounts, turns, agents)
    of_agents = _with_team(rewards, {turn.agent for turn in turns}, agents)
    before_punishment = _amounts(of_agents, turn_amounts, turns, agents)
    used = before_punishment if not punish else _punish(of_agents, turn_amounts, turns, agents)
    of_turns: dict[AgentName, list[float]] = {}
    for turn in turns:
        if turn.sample_id in turn_amounts:
            of_turns.setdefault(turn.agent, []).append(turn_amounts[turn.sample_id])
    return TrajectoryRewards(before_punishment, used, of_turns, rewards.metrics)


def _turn_rewards(
    trajectory: str, rewards: Rewards, turns: Sequence[EndedTurn], agents: Agents
) -> dict[str, float]:
    """By sample id: the rewards of single turns."""
    agent_of = {turn.sample_id: turn.agent for turn in turns}
    turn_amounts: dict[str, float] = {}
    for turn, value in rewards.turns:
        agent = agent_of.get(turn.sample_id)
        if not turn.sample_id or agent is None:
            which = f"turn {turn.sample_id}" if turn.sample_id else "a turn that was not generated"
            raise InvalidReward(
                f"agent {turn.agent!r}: {which} has the reward {value:g}, and is not of trajectory {trajectory}"
            )
        if agents[agent].credit.used_rewards is None and agents[agent].trained:
            raise RecipeError(
                f"the workflow gives a turn of agent {agent!r} a reward, which its algorithm does not use: set "
                f"agents.{agent}.algorithm.rewards to both or turn (to trajectory, if it is to be ignored)"
            )
        turn_amounts[turn.sample_id] = value
    return turn_amounts


def _take_outside(
    rewards: Rewards,
    turn_amounts: dict[str, float],
    turns: Sequence[EndedTurn],
    agents: Agents,
    outside: Mapping[str, float],
) -> None:
    """Puts rewards from outside in the place of those of the workflow: of agents, or of turns."""
    for turn in turns:
        if outside_reward(agents[turn.agent].columns) is not None:
            rewards.by_agent.pop(turn.agent, None)
            turn_amounts.pop(turn.sample_id, None)
    for turn in turns:
        if turn.sample_id in outside:
            if agents[turn.agent].credit.used_rewards in ("turn", "both"):
                turn_amounts[turn.sample_id] = outside[turn.sample_id]
            else:
                rewards.by_agent[turn.agent] = outside[turn.sample_id]


def _refuse_unrewarded(
    rewards: Rewards, turn_amounts: Mapping[str, float], turns: Sequence[EndedTurn], agents: Agents
) -> None:
    """Raises RecipeError for a trained agent with turns and without a reward that its algorithm uses."""
    paid = {turn.agent for turn in turns if turn.sample_id in turn_amounts}
    rewarded = {agent for agent in paid if agents[agent].credit.used_rewards != "trajectory"}
    for agent in (turn.agent for turn in turns):
        if agents[agent].trained and agent not in rewarded and agent not in rewards.by_agent:
            ignored = f": agents.{agent}.algorithm.rewards=trajectory ignores those of its turns"
            raise RecipeError(
                f"the workflow used agent {agent!r} and returned no reward for it"
                + (ignored if agent in paid else "")
            )


def _with_team(rewards: Rewards, used: set[AgentName], agents: Agents) -> dict[AgentName, float]:
    """By agent: its own reward and its share of the team's; agents that have neither are left out."""
    by_agent = {AgentName(agent): value for agent, value in rewards.by_agent.items()}
    if (team := rewards.team) is None:
        return by_agent
    in_order = [agent for agent in agents if agent in used or agent in by_agent]
    return {agent: by_agent.get(agent, 0.0) + agents[agent].credit.team_weight * team for agent in in_order}


def _amounts(
    by_agent: dict[AgentName, float],
    turn_amounts: Mapping[str, float],
    turns: Sequence[EndedTurn],
    agents: Agents,
) -> Amounts:
    by_sample: dict[str, float] = {}
    for turn in turns:
        of_turn, of_agent = turn_amounts.get(turn.sample_id, 0.0), by_agent.get(turn.agent, 0.0)
        match agents[turn.agent].credit.used_rewards:
            case "both":
                by_sample[turn.sample_id] = of_agent + of_turn
            case "turn":
                by_sample[turn.sample_id] = of_turn
            case "trajectory" | None:
                by_sample[turn.sample_id] = of_agent
    return Amounts(by_agent, by_sample)


def _punish(
    by_agent: dict[AgentName, float],
    turn_amounts: Mapping[str, float],
    turns: Sequence[EndedTurn],
    agents: Agents,
) -> Amounts:
    """Lowers an agent's reward by the cost of its longest turn; for ``rewards: turn`` each turn's by its own. With
    ``both`` and no reward of the agent's, all of its turns are lowered by the cost of the longest."""
    sampling = {agent: settings.sampling for agent, settings in agents.items()}
    longest: dict[AgentName, int] = {}
    lowered = dict(turn_amounts)
    for turn in turns:
        longest[turn.agent] = max(longest.get(turn.agent, 0), turn.tokens)
        limits = sampling[turn.agent]
        if agents[turn.agent].credit.used_rewards == "turn" and limits.overlong_buffer:
            cost = overlong_punishment(turn.tokens, limits.max_new_tokens, limits.overlong_buffer)
            lowered[turn.sample_id] = turn_amounts.get(turn.sample_id, 0.0) + cost
    for turn in turns:
        limits = sampling[turn.agent]
        if (
            agents[turn.agent].credit.used_rewards == "both"
            and turn.agent not in by_agent
            and limits.overlong_buffer
        ):
            cost = overlong_punishment(longest[turn.agent], limits.max_new_tokens, limits.overlong_buffer)
            lowered[turn.sample_id] = turn_amounts.get(turn.sample_id, 0.0) + cost
    less = punish_overlong(
        Rewards(metrics={}, **{str(agent): value for agent, value in by_agent.items()}), longest, sampling
    ).by_agent
    return _amounts({AgentName(agent): value for agent, value in less.items()}, lowered, turns, agents)


def unknown_agent(agent: str, names: Collection[str], subject: str) -> RecipeError:
    """The error for an agent's name that the config lacks. ``subject``: begins the sentence, and ends with its verb."""
    hint = "; the reward of all is Rewards().of_team(...)" if agent == "team" else guess(agent, names)
    return RecipeError(f"{subject} agent {agent!r}, which the config lacks; it has: {', '.join(names)}{hint}")
