"""Plan-path with environments that a file stops: runs of it are killed in the midst of a trajectory, and continued."""

import shutil
import signal
from pathlib import Path
from typing import Final

from flexmarl.launch.config.config_reading import RECIPES

from .conftest import Launcher, wait_until
from .in_process import Finished, RunsHere

_HELD: Final = '''

import asyncio
from pathlib import Path


class Held(PlanPath):
    """The walks of the position in the file ``hold``, and of later ones, stop after a round until the file is gone."""

    async def reset(self, query):
        self.hold, self.position = Path(query.data["hold"]), query.data["position"]
        return await super().reset(query)

    async def step(self, turns):
        outcome = await super().step(turns)
        while self.rounds == 1 and self.hold.exists() and self.position >= int(self.hold.read_text()):
            Path(f"{self.hold}.reached").touch()
            await asyncio.sleep(0.05)
        return outcome


workflow, problem_of, problems_of = Held, train_query, eval_queries


def train_query(position, seed, *, hold, **data):
    query = problem_of(position, seed, **data)
    return Query(query.id, query.text, {**query.data, "hold": hold, "position": position})


def eval_queries(seed, *, hold, **data):
    return [Query(q.id, q.text, {**q.data, "hold": hold, "position": 0}) for q in problems_of(seed, **data)]
'''
STEPS: Final = 4
QUERIES: Final = 2
"""Queries of a step."""


def held_recipe(folder: Path) -> Path:
    """The recipe, in ``folder``."""
    recipe = Path(shutil.copytree(RECIPES / "plan_path", folder / "held_path"))
    with (recipe / "workflow.py").open("a") as workflow:
        workflow.write(_HELD)
    return recipe


def whole_and_killed(
    launcher: Launcher, recipe: Path, folder: Path, *settings: str
) -> tuple[Finished, Finished]:
    """Two runs of ``STEPS`` steps with these settings, and a checkpoint at every second one: one as it is, and one that
    was killed within step 3, behind the first rounds of its walks, and continued. Their models are the same bit for
    bit."""
    here, name = RunsHere(launcher.runs), f"held-{folder.name}"
    whole = here.train(f"{name}-whole", *settings, f"data.hold={folder / 'never'}", recipe=recipe)
    assert whole.status == 0, whole.text

    hold, reached = folder / "hold", folder / "hold.reached"
    hold.write_text(str(2 * QUERIES))  # positions count from 0: the first query of step 3
    killed = launcher.train(name, *settings, f"data.hold={hold}", recipe=recipe)
    killed.wait_for_output("checkpoints/step_000002")
    wait_until(reached.exists, f"a walk of step 3 within its second round:\n{killed.text}")
    killed.signal(signal.SIGKILL)
    killed.wait()
    killed.assert_nothing_is_left()
    assert [line["step"] for line in killed.metrics] == [1, 2]

    hold.unlink()
    resumed = here.resume(name)
    assert resumed.status == 0, resumed.text
    assert "continuing after step 2" in resumed.text
    for policy in ("planner", "executor"):
        for file in ("model.safetensors", "training_state.safetensors"):
            path = Path("checkpoints") / f"step_{STEPS:06d}" / policy / file
            assert (resumed.directory / path).read_bytes() == (whole.directory / path).read_bytes(), path
    return whole, resumed
