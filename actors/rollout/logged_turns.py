"""Trajectories that ended before, perhaps outside of the run: as if their workflow had just returned. Pure."""

from collections.abc import Mapping

from ..columns.declared_columns import outside_reward
from ..messages import GenerateRequest, Generation, LoggedTrajectory, LoggedTurn, VersionRange
from ..names import AgentName
from ..workflow import Rewards
from .call_graph import TimedTurn
from .resumable_turn import ResumableTurn
from .rollout_setup import RolloutAgent
from .trajectory import Trajectory
from .trajectory_rewards import trajectory_rewards


def take_logged(
    trajectory: Trajectory, logged: LoggedTrajectory, agents: Mapping[AgentName, RolloutAgent]
) -> None:
    """Gives ``trajectory`` the turns and the rewards of ``logged``, and closes it. A turn of another policy has the
    oldest version that may generate turns of the trajectory: as all of its step's turns do, it depends on the
    correction, and on no bound of its age."""
    last: dict[AgentName, str] = {}
    for turn in logged.turns:
        ended = _ended_turn(trajectory, turn, agents[turn.agent])
        last[turn.agent] = ended.request.sample_id
        trajectory.begin_turn(turn.agent)
        trajectory.columns_of(turn.agent, ended.request.sample_id, agents[turn.agent].columns)
        trajectory.add_turn(turn.agent, ended, TimedTurn(turn.agent, 0.0, 0.0, len(turn.tokens)))
    trajectory.close()
    # An agent's reward is that of its last turn, as a judge gives it, where its turns alone are rewarded.
    of_agents: dict[str, float] = {
        agent: reward for agent, reward in logged.rewards.items() if not _rewards_turns(agents[agent])
    }
    of_turns = {last[agent]: reward for agent, reward in logged.rewards.items() if agent not in of_agents}
    trajectory.rewards = trajectory_rewards(
        trajectory.name,
        Rewards(metrics=None, **of_agents),
        trajectory.turns_to_reward(),
        agents,
        punish=True,
        outside=of_turns,
    )


def _rewards_turns(agent: RolloutAgent) -> bool:
    return agent.credit.used_rewards == "turn" or outside_reward(agent.columns) is not None


def _ended_turn(trajectory: Trajectory, turn: LoggedTurn, agent: RolloutAgent) -> ResumableTurn:
    version = trajectory.versions[agent.policy].oldest if turn.version is None else turn.version
    request = GenerateRequest(
        trajectory.next_sample_id(),
        agent.policy,
        (turn.prompt_tokens,),
        VersionRange.exactly(version),
        seed=0,
        temperature=turn.temperature,
        max_new_tokens=len(turn.tokens),
    )
    ended = ResumableTurn(request)
    ended.take(Generation(turn.text, turn.prompt_tokens, turn.tokens, turn.logprobs, version, "stop"))
    return ended
