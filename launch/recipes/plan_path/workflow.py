"""A planner and an executor walk over a grid with walls together, one step a round.

    U2L3=      the planner sees the way to the goal without walls, and answers two directions   LU
    .d.r#LU=   the executor sees the blocked directions and the plan, and answers a step        L

A direction is blocked by a wall, by the edge, and if it leads back to the place before. Neither agent can do it alone:
the planner does not see the walls, and the executor does not see the goal. The SFT teaches them the form of an answer
(a direction of the way and one across, in any order; one of the plan's directions, more often a blocked one than a free
one, so that it can tell them apart). Reinforcement learning teaches them which ones.
"""

import math
from collections import deque
from collections.abc import Sequence
from random import Random
from zlib import crc32

from flexmarl.actors.workflow import Agents, Query, Rewards

Place = tuple[int, int]
DIRECTIONS = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}


async def workflow(query: Query, agents: Agents) -> Rewards:
    grid = Grid(query.data["side"], query.data["walls"])
    place, goal = tuple(query.data["start"]), tuple(query.data["goal"])
    before = place
    distance = grid.distance(place, goal)
    rounds, bumps, rewards = 0, 0, Rewards()
    while distance and rounds < query.data["rounds"]:
        plan = await agents["planner"].generate(f"{way(place, goal)}=")
        step = await agents["executor"].generate(f"{grid.blocked(place, before)}#{plan.text}=")
        after = grid.after(place, step.text, before)
        closer, bumped = distance - grid.distance(after, goal), after == place
        rewards.of(plan, closer).of(step, closer - bumped)
        rounds, distance, bumps = rounds + 1, distance - closer, bumps + bumped
        if not bumped:
            before, place = place, after

    rewards.metrics = {"accuracy": float(not distance), "rounds": rounds, "bumps": bumps / rounds}
    return rewards


def train_query(position: int, seed: int, **data: int) -> Query:
    random = Random(f"{seed} train {position}")
    return draw(f"q{position:06}", random, held_out=False, **data)


def eval_queries(seed: int, *, eval_problems: int, **data: int) -> list[Query]:
    """Problems that ``train_query`` never returns."""
    random = Random(f"{seed} evaluation")
    return [
        draw(f"e{number:06}", random, held_out=True, **data, eval_problems=0)
        for number in range(eval_problems)
    ]


def sft(agent: str, batch: int, size: int, seed: int, *, side: int, **data: int) -> list[tuple[str, str]]:
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
    name: str, random: Random, held_out: bool, *, side: int, walls: int, rounds: int, eval_problems: int
) -> Query:
    """A problem with at least ``side - 1`` steps to the goal, from the held-out eighth of all, or from the others."""
    while True:
        start, goal, *blocked = random.sample(places(side), walls + 2)
        text = f"{name_of(start)}>{name_of(goal)}#{'#'.join(map(name_of, sorted(blocked)))}"
        distance = Grid(side, blocked).distance(start, goal)
        if side - 1 <= distance < rounds and (crc32(text.encode()) % 8 == 0) == held_out:
            data = {"side": side, "rounds": rounds, "start": start, "goal": goal, "walls": blocked}
            return Query(name, text, data)


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
