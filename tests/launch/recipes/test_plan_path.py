"""plan-path: the grid, and what a planner and an executor get for their turns."""

import math

from flexmarl.actors.environments.environment import play
from flexmarl.actors.recipe.recipe import Recipe
from flexmarl.actors.workflow import Query, Turn
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.recipes.plan_path.workflow import Grid, PlanPath, way

from .scripted import Scripted

# . . G     row 0
# S # .     row 1
# . . .
GRID = Grid(3, [(1, 1)])
DATA = {"side": 3, "rounds": 4, "start": (1, 0), "goal": (0, 2), "walls": [(1, 1)], "planner_reward": "step"}
QUERY = Query("q", "", DATA)


def test_a_step_into_a_wall_or_over_the_edge_stays() -> None:
    assert GRID.after((1, 0), "U") == (0, 0)
    assert GRID.after((1, 0), "R") == GRID.after((1, 0), "L") == GRID.after((1, 0), "?") == (1, 0)
    assert GRID.blocked((1, 0)) == "..lr"
    assert GRID.blocked((0, 0)) == "u.l."


def test_no_step_leads_back() -> None:
    assert GRID.after((0, 0), "D", before=(1, 0)) == (0, 0)
    assert GRID.blocked((0, 0), before=(1, 0)) == "udl."


def test_the_distance_is_around_the_walls() -> None:
    assert GRID.distance((1, 0), (1, 2)) == 4
    assert GRID.distance((1, 0), (0, 2)) == 3
    assert GRID.distance((0, 0), (1, 1)) == math.inf


def test_the_way_names_directions_and_distances() -> None:
    assert [way((3, 3), goal) for goal in ((1, 0), (4, 3), (3, 4))] == ["U2L3", "D1.0", ".0R1"]


async def test_every_turn_is_paid_for_the_way_that_it_saves() -> None:
    planner, executor = Scripted("planner", "RU"), Scripted("executor", "R", "U", "R", "R")
    rewards = (await play(PlanPath(), QUERY, {"planner": planner, "executor": executor})).checked()
    assert planner.prompts == ["U1R2=", "U1R2=", ".0R2=", ".0R1="]
    assert executor.prompts == ["..lr#RU=", "..lr#RU=", "udl.#RU=", "udl.#RU="]
    paid = {turn.sample_id: reward for turn, reward in rewards.turns}
    assert [paid[f"planner-{n}"] for n in range(4)] == [0, 1, 1, 1]
    assert [paid[f"executor-{n}"] for n in range(4)] == [-1, 1, 1, 1]  # its first step was into the wall
    assert rewards.metrics == {"accuracy": 1.0, "rounds": 4.0, "bumps": 0.25}


async def test_a_goal_that_is_not_reached_ends_after_the_rounds() -> None:
    planner, executor = Scripted("planner", ""), Scripted("executor", "D", "U")
    rewards = (await play(PlanPath(), QUERY, {"planner": planner, "executor": executor})).checked()
    assert rewards.metrics["accuracy"] == 0.0 and rewards.metrics["rounds"] == 4.0


async def test_a_plan_is_paid_at_once_for_its_first_free_direction_if_the_recipe_says_so() -> None:
    planner, executor = Scripted("planner", "RU", "LL"), Scripted("executor", "R", "U", "R", "R")
    query = Query("q", "", DATA | {"planner_reward": "plan"})
    rewards = (await play(PlanPath(), query, {"planner": planner, "executor": executor})).checked()
    paid = {turn.sample_id: reward for turn, reward in rewards.turns}
    # Right is blocked, so up; left is blocked twice.
    assert [paid[f"planner-{n}"] for n in range(4)] == [1, 0, 0, 0]


async def test_copies_of_a_walk_share_nothing() -> None:
    walk = PlanPath()
    await walk.reset(QUERY)
    fork = await walk.fork()
    await fork.step({"planner": Turn("planner", "UR", (), (), "p")})
    await fork.step({"executor": Turn("executor", "U", (), (), "e")})
    assert fork.place == (0, 0) and walk.place == (1, 0)
    assert [reward for _, reward in (await fork.interim()).turns] == [1, 1]
    assert (await walk.interim()).turns == []


async def test_only_a_planner_and_an_executor_that_work_together_arrive() -> None:
    """The order of the tests' planner is that of the longer way, its executor takes the first free direction."""
    queries = Recipe(resolve("plan-path", []).recipe_config()).eval_queries()
    reached = 0
    for query in queries:
        grid, place = Grid(query.data["side"], query.data["walls"]), query.data["start"]
        for _ in range(query.data["rounds"]):
            rows, columns = (query.data["goal"][axis] - place[axis] for axis in (0, 1))
            vertical, horizontal = "U" if rows < 0 else "D", "L" if columns < 0 else "R"
            plan = vertical + horizontal if abs(rows) >= abs(columns) else horizontal + vertical
            free = [step for step in plan if grid.after(place, step) != place]
            place = grid.after(place, free[0] if free else "")
            if place == query.data["goal"]:
                reached += 1
                break
    assert 0.8 < reached / len(queries) < 1.0
