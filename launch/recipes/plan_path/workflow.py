"""A planner and an executor walk over a grid with walls together, one step a round.

    U2L3=      the planner sees the way to the goal without walls, and answers two directions   LU
    .d.r#LU=   the executor sees the blocked directions and the plan, and answers a step        L

A direction is blocked by a wall, by the edge, and if it leads back to the place before. Neither agent can do it alone:
the planner does not see the walls, and the executor does not see the goal. The SFT teaches them the form of an answer
(a direction of the way and one across, in any order; one of the plan's directions, more often a blocked one than a free
one, so that it can tell them apart). Reinforcement learning teaches them which ones.
"""

import copy
import math
from collections import deque
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any
from zlib import crc32

from flexmarl.actors.environments.environment import Ask, Asked, Environment
from flexmarl.actors.workflow import Query, Rewards, Turn

Place = tuple[int, int]
DIRECTIONS = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}


class PlanPath(Environment):
    """One walk. ``planner_reward``: ``step``, a plan is paid for the step that the executor makes of it; ``plan``, it
    is paid at once, for its first direction that is free, as a tree needs it."""

    async def reset(self, query: Query) -> Asked:
        data = query.data
        self.rounds_left, self.planner_reward = data["rounds"], data["planner_reward"]
        self.grid = Grid(data["side"], data["walls"])
        self.place, self.goal = tuple(data["start"]), tuple(data["goal"])
        self.before = self.place
        self.distance = self.grid.distance(self.place, self.goal)
        self.rounds = self.bumps = 0
        self.paid: tuple[tuple[Turn, float], ...] = ()
        return self.next_plan()

    def next_plan(self) -> Asked:
        return {"planner": Ask(f"{way(self.place, self.goal)}=", new=True)}

    async def step(self, turns: Mapping[str, Turn]) -> Asked | Rewards:
        if "planner" in turns:
            self.plan = turns["planner"]
            if self.planner_reward == "plan":
                self.paid += ((self.plan, self.saved(self.planned())),)
            blocked = self.grid.blocked(self.place, self.before)
            return {"executor": Ask(f"{blocked}#{self.plan.text}=", new=True)}
        after = self.grid.after(self.place, turns["executor"].text, self.before)
        closer, bumped = self.saved(after), after == self.place
        if self.planner_reward == "step":
            self.paid += ((self.plan, closer),)
        self.paid += ((turns["executor"], closer - bumped),)
        self.rounds, self.distance, self.bumps = self.rounds + 1, self.distance - closer, self.bumps + bumped
        if not bumped:
            self.before, self.place = self.place, after
        if self.distance and self.rounds < self.rounds_left:
            return self.next_plan()
        rewards = await self.interim()
        metrics = {
            "accuracy": float(not self.distance),
            "rounds": self.rounds,
            "bumps": self.bumps / self.rounds,
        }
        rewards.metrics.update(metrics)
        return rewards

    def planned(self) -> Place:
        """The place that the first free direction of the plan leads to."""
        ends = (self.grid.after(self.place, step, self.before) for step in self.plan.text)
        return next((end for end in ends if end != self.place), self.place)

    def saved(self, after: Place) -> float:
        """The steps that the way to the goal becomes shorter."""
        return self.distance - self.grid.distance(after, self.goal)

    async def fork(self) -> "PlanPath":
        return copy.copy(self)

    async def interim(self) -> Rewards:
        rewards = Rewards()
        for turn, reward in self.paid:
            rewards.of(turn, reward)
        return rewards


workflow = PlanPath


def train_query(position: int, seed: int, **data: Any) -> Query:
    random = Random(f"{seed} train {position}")
    return draw(f"q{position:06}", random, held_out=False, **data)


def eval_queries(seed: int, *, eval_problems: int, **data: Any) -> list[Query]:
    """Problems that ``train_query`` never returns."""
    random = Random(f"{seed} evaluation")
    return [
        draw(f"e{number:06}", random, held_out=True, **data, eval_problems=0)
        for number in range(eval_problems)
    ]


def sft(agent: str, batch: int, size: int, seed: int, *, side: int, **data: Any) -> list[tuple[str, str]]:
    """Plans of a direction of the way and one across, in any order; steps of the plan, more often blocked than free."""
    random = Random(f"{seed} SFT {agent} {batch}")
    examples = []
    for _ in range(size):
        start, goal = random.sample(places(side), 2)
        direction = random.choice([step for step in DIRECTIONS if step in way(start, goal)])
        plan = "".join(random.sample([direction, random.choice("LR" if direction in "UD" else "UD")], 2))
        blocked = "".join(step.lower() if random.random() < 0.3 else "." for step in DIRECTIONS)
        if agent == "planner":
            examples.append((f"{way(start, goal)}=", plan))
        else:
            step = random.choices(plan, weights=[3 if step.lower() in blocked else 1 for step in plan])[0]
            examples.append((f"{blocked}#{plan}=", step))
    return examples


def draw(
    name: str,
    random: Random,
    held_out: bool,
    *,
    side: int,
    walls: int,
    rounds: int,
    eval_problems: int,
    planner_reward: str,
) -> Query:
    """A problem with at least ``side - 1`` steps to the goal, from the held-out eighth of all, or from the others."""
    while True:
        start, goal, *blocked = random.sample(places(side), walls + 2)
        text = f"{name_of(start)}>{name_of(goal)}#{'#'.join(map(name_of, sorted(blocked)))}"
        distance = Grid(side, blocked).distance(start, goal)
        if side - 1 <= distance < rounds and (crc32(text.encode()) % 8 == 0) == held_out:
            data = {"side": side, "rounds": rounds, "start": start, "goal": goal, "walls": blocked}
            return Query(name, text, {**data, "planner_reward": planner_reward})


def places(side: int) -> list[Place]:
    return [(row, column) for row in range(side) for column in range(side)]


def way(start: Place, goal: Place) -> str:
    """The way without walls: ``U2L3`` is two rows up and three columns to the left, ``.0L3`` is in the same row."""
    rows, columns = goal[0] - start[0], goal[1] - start[1]
    vertical = "U" if rows < 0 else "D" if rows else "."
    horizontal = "L" if columns < 0 else "R" if columns else "."
    return f"{vertical}{abs(rows)}{horizontal}{abs(columns)}"


def name_of(place: Place) -> str:
    return f"{'abcdefghij'[place[0]]}{place[1]}"


class Grid:
    """``side`` by ``side`` places, some of them walls."""

    def __init__(self, side: int, walls: Sequence[Place]) -> None:
        self._free = set(places(side)) - {(row, column) for row, column in walls}

    def after(self, place: Place, step: str, before: Place | None = None) -> Place:
        """The place after a step; the same one if the step is blocked or invalid, or leads back to ``before``."""
        row, column = DIRECTIONS.get(step, (0, 0))
        target = (place[0] + row, place[1] + column)
        return target if target in self._free and target != before else place

    def blocked(self, place: Place, before: Place | None = None) -> str:
        """The blocked directions in small letters, a dot for each of the others: ``.d.r``."""
        return "".join(
            step.lower() if self.after(place, step, before) == place else "." for step in DIRECTIONS
        )

    def distance(self, start: Place, goal: Place) -> float:
        """Steps of the shortest way around the walls; infinite if there is no way."""
        seen, queue = {start: 0}, deque([start])
        while queue:
            place = queue.popleft()
            if place == goal:
                return seen[place]
            for step in DIRECTIONS:
                if (neighbour := self.after(place, step)) not in seen:
                    seen[neighbour] = seen[place] + 1
                    queue.append(neighbour)
        return math.inf
