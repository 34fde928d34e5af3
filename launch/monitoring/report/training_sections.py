"""Tables of the report about learning: rewards by agent, figures of the weights by policy."""

from typing import Final

from ....actors.names import AgentName
from ..formatting import compact, count
from .charts import Point
from .page_parts import note, table
from .run_history import History, first_and_last

_AGENTS_NAMED = 8

# Heading, format, figure of an agent, and the figure that it is divided by; a column of zeros is left out:
_OF_AGENT: Final[tuple[tuple[str, str, str, str], ...]] = (
    ("tokens a turn", ".1f", "tokens", "turns"),
    ("truncated", ".1%", "truncated_turns", "turns"),
    ("zero advantage", ".2g", "zero_advantage_groups", ""),
)
# Heading, format, figure of a policy; a column without any value is left out:
_OF_POLICY: Final[tuple[tuple[str, str, str], ...]] = (
    ("nonzero advantage", ".0%", "nonzero_advantage_share"),
    ("loss", ".3g", "loss"),
    ("grad norm", ".3g", "grad_norm"),
    ("clipped", ".2%", "clip_fraction"),
    ("mismatch", ".2g", "ratio_deviation"),
    ("value loss", ".3g", "value_loss"),
    ("explained variance", ".3g", "explained_variance"),
)
_POLICY_WORDS = (
    "* Mean of the last 5% of the steps. Nonzero advantage: share of the samples. Clipped: share of the tokens. "
    "Mismatch: mean of |ratio - 1| between the trainer's and the engine's probability of a token."
)
_AGENT_WORDS = (
    "* Mean of the last 5% of the steps. Truncated: turns that ended at max_new_tokens. Zero advantage: groups left "
    "out because all rewards are equal."
)


def reward_caption(history: History) -> str:
    """The rewards at both ends of the run, in one sentence; empty for less than two steps."""
    words = [
        f"{agent} {ends[0]:.3f} → {ends[1]:.3f}"
        for agent in history.agents[:_AGENTS_NAMED]
        if (ends := first_and_last(rewards_of(history, agent)))
    ]
    if not words or len(history.steps) < 2:
        return ""
    unnamed = len(history.agents) - _AGENTS_NAMED
    more = f" and {count(unnamed, 'more agent')}" if unnamed > 0 else ""
    return f"Reward, first 5% of the steps → last 5%: {', '.join(words)}{more}."


def mean_rewards(history: History) -> tuple[float, float] | None:
    """The mean reward of all agents at both ends of the run."""
    ends_of_agents = [
        ends for agent in history.agents if (ends := first_and_last(rewards_of(history, agent)))
    ]
    if not ends_of_agents:
        return None
    first, last = (sum(ends[side] for ends in ends_of_agents) / len(ends_of_agents) for side in (0, 1))
    return first, last


def agents_and_policies(history: History) -> str:
    """Two tables: rewards by agent, versions and figures of training by policy."""
    agents, policies = _agents(history), _policies(history)
    return f"<h2>Agents and policies</h2>{agents}{policies}" if agents or policies else ""


def _agents(history: History) -> str:
    if not history.agents:
        return ""
    shown = [
        column
        for column in _OF_AGENT
        if any(value for agent in history.agents for _, value in history.of_agent(agent, *column[2:]))
    ]
    shared = any(history.policy_of.get(agent, agent) != agent for agent in history.agents)
    rows = []
    for agent in history.agents:
        ends = first_and_last(rewards_of(history, agent))
        row = [agent, *([history.policy_of.get(agent, agent)] if shared else [])]
        row += [f"{value:.3f}" for value in ends] if ends else ["–", "–"]
        columns = [(form, history.of_agent(agent, figure, whole)) for _, form, figure, whole in shown]
        rows.append(row + [_at_the_end(points, form) for form, points in columns])
    heads = ["agent", *(["policy"] if shared else []), "reward, first 5%", "reward, last 5%"]
    heads += [f"{column[0]}*" for column in shown]
    return table(heads, rows) + (note(_AGENT_WORDS) if shown else "")


def _policies(history: History) -> str:
    if not history.policies:
        return ""
    shown = [
        column
        for column in _OF_POLICY
        if any(history.of_policy(policy, column[2]) for policy in history.policies)
    ]
    rows = []
    for policy in history.policies:
        samples = sum(n for _, n in history.of_policy(policy, "samples"))
        staleness = max((n for _, n in history.of_policy(policy, "max_staleness")), default=0)
        row = [policy, str(history.versions[policy]), compact(samples), f"{staleness:g}"]
        rows.append(row + [_at_the_end(history.of_policy(policy, figure), form) for _, form, figure in shown])
    heads = ["policy", "version", "samples", "max staleness", *(f"{head}*" for head, _, _ in shown)]
    return table(heads, rows) + note(_POLICY_WORDS)


def _at_the_end(points: list[Point], form: str) -> str:
    ends = first_and_last(points)
    return format(ends[1], form) if ends else "–"


def rewards_of(history: History, agent: AgentName) -> list[Point]:
    """(step, value) of the agent's mean reward."""
    return history.of_agent(agent, "reward")
