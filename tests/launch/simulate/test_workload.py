"""Workloads: the calls that a trajectory makes, their lengths and times, all decided by names."""

import asyncio
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flexmarl.actors.names import AgentName
from flexmarl.actors.recipe.recipe import Recipe, RecipeConfig
from flexmarl.actors.workflow import Turn
from flexmarl.core.testing import virtual_time
from flexmarl.launch.simulate import scenario
from flexmarl.launch.simulate.workload_config import WorkloadConfig

FOLDER = Path(scenario.__file__).parent / "workload_recipe"
LENGTHS = {"prompt": {"median": 100, "sigma": 0.5}, "answer": {"median": 10}}


def workload(**changes: Any) -> WorkloadConfig:
    agents = dict.fromkeys(("plan", "left", "right", "write"), LENGTHS)
    calls = ["plan", ["left", {"agent": "right", "chance": 0.25, "times": 2}], "write"]
    return WorkloadConfig.model_validate({"agents": agents, "calls": calls, **changes})


@dataclass
class FakeAgents:
    """Agents of one trajectory, each of whose turns takes a second. ``calls``: agent, length, begin of each."""

    trajectory: int
    calls: list[tuple[str, int, float]] = field(default_factory=list)
    agent: str = ""

    def __getitem__(self, agent: str) -> "FakeAgents":
        return FakeAgents(self.trajectory, self.calls, agent)

    async def generate(self, prompt: str) -> Turn:
        self.calls.append((self.agent, len(prompt), asyncio.get_running_loop().time()))
        number = len(self.calls)
        await asyncio.sleep(1.0)
        return Turn(self.agent, "x", (1,), (1,), sample_id=f"q_{number}_{self.trajectory}")


def played(count: int, config: WorkloadConfig) -> list[list[tuple[str, int, float]]]:
    """The calls of each trajectory of one query."""
    data = scenario.recipe_data(config)
    recipe = Recipe(RecipeConfig(folder=str(FOLDER), data=data, seed=1))

    async def play() -> list[list[tuple[str, int, float]]]:
        query = recipe.train_query(0)
        trajectories = []
        for number in range(count):
            agents = FakeAgents(number)
            await recipe.workflow(query, agents)  # type: ignore[arg-type]
            trajectories.append(agents.calls)
        return trajectories

    return virtual_time.run(play())


def test_stages_follow_each_other_and_calls_of_one_run_at_once() -> None:
    (calls,) = played(1, workload(calls=["plan", ["left", "right"], "write"], environment={"median_s": 2.0}))
    begin = calls[0][2]
    assert [(agent, at - begin) for agent, _, at in calls] == [
        ("plan", 0.0), ("left", 3.0), ("right", 3.0), ("write", 6.0),
    ]  # fmt: skip


def test_a_part_of_the_trajectories_makes_a_call_that_has_a_chance() -> None:
    trajectories = played(400, workload())
    counts = [sum(agent == "right" for agent, _, _ in calls) for calls in trajectories]
    assert set(counts) == {0, 2} and 60 < counts.count(2) < 140
    assert {agent for calls in trajectories for agent, _, _ in calls} == {"plan", "left", "right", "write"}


def test_prompts_have_the_lengths_of_the_workload_and_those_of_a_query_begin_alike() -> None:
    trajectories = played(400, workload())
    assert len({calls[0][1] for calls in trajectories}) == 1, "the first prompt of a group is one"
    lengths = [calls[-1][1] for calls in trajectories]
    assert 90 < statistics.median(lengths) < 110 and len(set(lengths)) > 50
    short = workload(agents={**workload().model_dump()["agents"], "write": {
        "prompt": {"median": 100, "sigma": 2.0, "longest": 120}, "answer": {"median": 10}}})  # fmt: skip
    assert max(calls[-1][1] for calls in played(50, short)) == 120


def test_the_same_names_play_the_same() -> None:
    assert played(20, workload()) == played(20, workload())


def test_a_prompt_has_a_limit_of_eight_medians_unless_it_is_given() -> None:
    assert workload().agents[AgentName("plan")].prompt.most == 800


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"calls": ["plan", "judge"]}, "agent 'judge' has no lengths"),
        ({"calls": []}, "calls"),
        ({"calls": [{"agent": "plan", "chance": 1.5}]}, "chance"),
        ({"agents": {"plan": {"prompt": {"median": 100}}}}, "agents.plan.answer"),
        ({"environment": {"sigma": 1.0}}, "environment.median_s"),
    ],
)
def test_mistakes_are_refused_by_their_key(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        workload(**changes)


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("agents.plan.prompt.median", {"agents": {"plan": {**LENGTHS, "prompt": {"median": 1e300}}}}),
        ("agents.plan.prompt.median", {"agents": {"plan": {**LENGTHS, "prompt": {"median": 0.001}}}}),
        (
            "agents.plan.answer.sigma",
            {"agents": {"plan": {**LENGTHS, "answer": {"median": 1, "sigma": 1e300}}}},
        ),
        ("environment.median_s", {"environment": {"median_s": 1e300}}),
        ("reward.sigma", {"reward": {"median_s": 1, "sigma": 1e5}}),
    ],
)
def test_lengths_and_times_that_only_a_mistake_has_are_refused(key: str, section: dict[str, Any]) -> None:
    with pytest.raises(
        ValidationError, match=rf"(?m)^{key}\n  Input should be (less|greater) than or equal to 1"
    ):
        workload(**{"calls": ["plan"], **section})


def test_the_turns_of_a_worker_share_its_processor() -> None:
    config = workload(calls=["plan", "write"], turn_s=0.25)
    recipe = Recipe(RecipeConfig(folder=str(FOLDER), data=scenario.recipe_data(config), seed=1))
    agents = [FakeAgents(number) for number in range(3)]

    async def play() -> None:
        query = recipe.train_query(0)
        async with asyncio.TaskGroup() as tasks:
            for trajectory in agents:
                tasks.create_task(recipe.workflow(query, trajectory))  # type: ignore[arg-type]

    for _ in range(2):  # a second simulation begins with free workers
        for trajectory in agents:
            trajectory.calls.clear()
        virtual_time.run(play())
        begins = sorted(begin for trajectory in agents for _, _, begin in trajectory.calls)
        assert begins == pytest.approx([0.75] * 3 + [2.5] * 3)
