"""The workload of a recorded run: what it has measured, as the section of a scenario has it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean
from typing import Any, Final

from ...actors.errors import ConfigError
from ...actors.names import PolicyName
from ..config.config_reading import check, read_yaml
from ..config.run_config import RunConfig
from ..run_folder.json_lines import read_lines
from ..run_folder.run_directory import RunDirectory
from .measured_run import computed_share, mean_prompt, trained_share, turn_s

_PERCENTILE: Final = "turn_tokens_p"
_TENTHS: Final = 2 * NormalDist().inv_cdf(0.9)
"""Standard deviations between the tenth and the ninetieth percentile."""
_ENOUGH_STEPS: Final = 4
"""Figures since the start are compared between the first step and the last but one."""


@dataclass(frozen=True, slots=True)
class RecordedWorkload:
    """``source``: the run. ``answers``: sections of each agent. ``prompts``: mean tokens of each. ``computed``,
    ``trained``: parts of the tokens that its engines and its training compute. Agents are left out where it was not
    measured. ``calls``: of each agent in a trajectory, the mean. ``turn_s``, ``environment_s``, ``reward_s``: beside
    a turn, and at the end of a trajectory; 0 if they were not measured."""

    source: str
    answers: Mapping[str, Mapping[str, float]]
    prompts: Mapping[str, float] = field(default_factory=dict)
    computed: Mapping[str, float] = field(default_factory=dict)
    trained: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[str, float] = field(default_factory=dict)
    turn_s: float = 0.0
    environment_s: float = 0.0
    reward_s: float = 0.0


def recorded_workload(run: RunDirectory) -> RecordedWorkload:
    """Raises ConfigError for a run without a complete step."""
    rows, _ = read_lines(run.metrics) if run.metrics.exists() else ([], 0)
    key = f"{_PERCENTILE}50/"
    agents = [*dict.fromkeys(name.removeprefix(key) for row in rows for name in row if name.startswith(key))]
    if not agents:
        raise ConfigError(f"{run.path} has no lengths of answers: no step of it is complete")
    config = check(read_yaml(run.config), str(run.config))
    policies = {str(agent): of.policy for agent, of in config.agents.items() if agent in agents}
    is_long = len(rows) >= _ENOUGH_STEPS
    trajectories = config.training.queries_per_step * config.training.trajectories_per_query
    turns = {agent: _mean(rows, f"turns/{agent}") for agent in policies}
    of_turn_s = turn_s(rows, agents) if is_long else 0.0
    beside_s = _mean(rows, "environment_s") / (sum(turns.values()) or 1.0)
    return RecordedWorkload(
        source=str(run.path),
        answers={
            agent: _answer(rows, [other for other in agents if policies.get(other) == policy])
            for agent, policy in policies.items()
        },
        prompts=_drop_missing({agent: mean_prompt(rows, of) for agent, of in policies.items()}),
        computed=_drop_missing(
            {agent: computed_share(rows, of) for agent, of in policies.items() if is_long}
        ),
        trained=_drop_missing({agent: _mean_share(config, of, rows) for agent, of in policies.items()}),
        calls={agent: count / trajectories for agent, count in turns.items() if count},
        turn_s=of_turn_s,
        environment_s=max(0.0, beside_s - of_turn_s),
        reward_s=_mean(rows, "reward_s") / trajectories,
    )


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    """Mean of the steps but the first, in which everything is used for the first time."""
    return fmean(row.get(key, 0.0) for row in rows[1:] or rows)


def _drop_missing(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {name: number for name, number in numbers.items() if number}


def _mean_share(config: RunConfig, policy: PolicyName, rows: Sequence[Mapping[str, Any]]) -> float | None:
    shares = [trained_share(config, policy, row) for row in rows if row.get(f"samples/{policy}")]
    return fmean(shares) if shares else None


def _answer(rows: Sequence[Mapping[str, Any]], agents: Sequence[str]) -> dict[str, float]:
    """The lognormal distribution with the percentiles of the turns, the means over the steps. ``agents``: those that
    share a policy, and so one distribution here: it has the mean and the spread of all their turns."""
    parts = [_logarithms(rows, agent) for agent in agents]
    turns = sum(count for count, _, _ in parts)
    mean = sum(count * center for count, center, _ in parts) / turns
    variance = sum(count * (sigma**2 + (center - mean) ** 2) for count, center, sigma in parts) / turns
    return {"median": math.exp(mean), "sigma": math.sqrt(variance)}


def _logarithms(rows: Sequence[Mapping[str, Any]], agent: str) -> tuple[float, float, float]:
    """An agent's turns in a step, and the mean and the standard deviation of their lengths' logarithms."""
    present = [row for row in rows if f"{_PERCENTILE}50/{agent}" in row]
    p10, p50, p90 = (
        fmean(math.log(max(1.0, row[f"{_PERCENTILE}{percent}/{agent}"])) for row in present)
        for percent in (10, 50, 90)
    )
    return fmean(row[f"turns/{agent}"] for row in present), p50, (p90 - p10) / _TENTHS


def set_workload(raw: dict[str, Any], recorded: RecordedWorkload) -> None:
    """Writes what a run has measured into the scenario ``raw``: answers, the computed parts and the time of a turn in
    place of its own; prompts, calls and the times beside turns if it has none. Raises ConfigError for an agent that
    the run does not have."""
    workload = raw["workload"] = {} if raw.get("workload") is None else raw["workload"]
    agents = workload.setdefault("agents", {}) if isinstance(workload, dict) else None
    if not isinstance(agents, dict):
        return  # it is refused where the section is read
    for name in agents:
        if name not in recorded.answers:
            raise ConfigError(
                f"--from {recorded.source}: that run has no agent {name!r}; it has: {', '.join(recorded.answers)}"
            )
    workload.setdefault("calls", _stages(recorded.calls))
    if recorded.turn_s:
        workload["turn_s"] = recorded.turn_s
    for key in ("environment", "reward"):
        if seconds := getattr(recorded, f"{key}_s"):
            workload.setdefault(key, {"median_s": seconds})
    for name in recorded.answers:
        section = agents.setdefault(name, {})
        if isinstance(section, dict):
            _set_agent(section, name, recorded)


def _set_agent(section: dict[str, Any], name: str, recorded: RecordedWorkload) -> None:
    section["answer"] = dict(recorded.answers[name])
    if name in recorded.trained:
        section["trained"] = recorded.trained[name]
    if name in recorded.prompts:
        section.setdefault("prompt", {"median": recorded.prompts[name]})
    if name in recorded.computed and isinstance(prompt := section.get("prompt"), dict):
        prompt["computed"] = recorded.computed[name]


def _stages(calls: Mapping[str, float]) -> list[dict[str, Any]]:
    """All agents in turn, again and again. A mean that is not whole is the chance of the last call."""
    rounds = math.ceil(max(calls.values(), default=0.0))
    return [
        {"agent": agent, "chance": min(1.0, mean - count)}
        for count in range(rounds)
        for agent, mean in calls.items()
        if mean > count
    ]
