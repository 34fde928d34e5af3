"""The recipe's data: its deadline, and the line at which it stands."""

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from flexmarl.actors.errors import RecipeError
from flexmarl.actors.orchestrator.queries.recipe_data import RecipeData
from flexmarl.actors.recipe.recipe import Recipe, RecipeConfig
from flexmarl.core.system import ActorSystem

from ....patience import PATIENCE_S

SOURCE = """from flexmarl.actors.workflow import Query

async def workflow(query, agents): ...

def train_query(position, seed, gate):
    gate.wait()
    return Query(f"q{position}", str(position))

def eval_queries(seed, gate):
    gate.wait()
    return []
"""


class FakeCluster:
    """A recipe whose data comes when ``gate`` is set."""

    def __init__(self, system: ActorSystem, folder: Path) -> None:
        (folder / "workflow.py").write_text(SOURCE)
        self.gate = threading.Event()
        self.recipe = Recipe(RecipeConfig(folder=str(folder), seed=0, data={"gate": self.gate}))
        self.system = system

    def data(self, timeout_s: float) -> RecipeData:
        return RecipeData(self.recipe, lambda: cast(Any, self.system), timeout_s)


@pytest.fixture
async def cluster(system: ActorSystem, tmp_path: Path) -> Any:
    cluster = FakeCluster(system, tmp_path)
    yield cluster
    cluster.gate.set()


async def test_data_that_comes_in_time_is_returned_and_waited_for_no_more(cluster: FakeCluster) -> None:
    data = cluster.data(PATIENCE_S)
    assert data.waits() == []
    call = asyncio.ensure_future(data.call(lambda: "train_query", lambda: cluster.recipe.train_query(3)))
    async with asyncio.timeout(PATIENCE_S):
        while not (waits := data.waits()) or "in train_query" not in waits[0].text:  # a thread has to begin
            await asyncio.sleep(0.001)
    (wait,) = waits
    assert wait.text == "train_query of workflow.py, at workflow.py:6, in train_query: gate.wait()"
    assert wait.limit == f"training.data_timeout_s={PATIENCE_S:g} ends it" and not wait.actor
    cluster.gate.set()
    assert (await call).id == "q3" and data.waits() == []


@pytest.mark.parametrize("function", ["train_query", "eval_queries"])
async def test_data_that_does_not_come_ends_the_call_with_its_line(
    cluster: FakeCluster, function: str
) -> None:
    data = cluster.data(0.05)
    with pytest.raises(RecipeError) as raised:
        await data.call(
            lambda: function,
            lambda: (
                cluster.recipe.train_query(0) if function == "train_query" else cluster.recipe.eval_queries()
            ),
        )
    assert f"workflow.py: {function} has not returned within training.data_timeout_s=0.05" in str(
        raised.value
    )
    assert data.waits() == []


async def test_a_timeout_of_the_recipes_own_is_no_deadline(cluster: FakeCluster) -> None:
    def no_data() -> None:
        raise TimeoutError("the data set's server")

    with pytest.raises(TimeoutError, match="the data set's server"):
        await cluster.data(PATIENCE_S).call(lambda: "eval_queries", no_data)
