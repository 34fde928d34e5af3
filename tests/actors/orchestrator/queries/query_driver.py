"""A run's queries without the rest of the run: groups close in any order, with results that their queries decide."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, cast

from pydantic import TypeAdapter

from flexmarl.actors.messages import GroupClosed, TrajectoryFailure
from flexmarl.actors.names import AgentName, PolicyName, Step, Version
from flexmarl.actors.orchestrator.plan import Plan
from flexmarl.actors.orchestrator.queries.queries_state import QueriesState
from flexmarl.actors.orchestrator.queries.run_queries import RunQueries
from flexmarl.actors.recipe.recipe import Recipe, RecipeConfig
from flexmarl.actors.recipe.sources.plain_source import PlainSourceConfig
from flexmarl.actors.recipe.sources.source_config import SourceConfig
from flexmarl.actors.trees.success_model import FEATURES, PrefixEnd

SOLVER = AgentName("solver")
QUERIES = 4
REPLACEMENTS = 2
PLAIN = PlainSourceConfig()
DATA = """
from flexmarl.actors.workflow import Query

async def workflow(query, agents): ...

def train_query(position, seed):
    return Query(f"q{position}", f"task {position}", {"key": b"%d" % position})

def eval_queries(seed):
    return [Query("e0", "task")]
"""


class Inline:
    """Calls at once: a thread would make the examples of a property slow."""

    async def run_blocking(self, work: Any, *, abandon: bool) -> Any:
        return work()


def recipe_of(folder: Path, code: str, queries: SourceConfig = PLAIN) -> Recipe:
    (folder / "workflow.py").write_text(DATA + code)
    return Recipe(RecipeConfig(folder=str(folder), data={}, seed=0, query_source=queries))


def plan(save_every: int) -> Plan:
    return Plan("strict", (PolicyName("solver"),), Step(1), Step(9), QUERIES, 1, save_every=save_every)


def queries_of(recipe: Recipe, save_every: int = 1, resumed: QueriesState | None = None) -> RunQueries:
    system = cast(Any, Inline())
    return RunQueries(recipe, lambda: system, 60.0, plan(save_every), "accuracy", resumed, predicts=True)


def group(step: int, query: str, *solved: bool, failures: int = 0, dropped: str = "") -> GroupClosed:
    """``solved``: of each trajectory that counts."""
    values = [float(one) for one in solved]
    failed = [TrajectoryFailure(f"{step}:{query}_{n}", "error", "") for n in range(failures)]
    metrics = {"accuracy": values} if values else {}
    return GroupClosed(Step(step), query, {}, {}, 0.0, {SOLVER: values}, failed, dropped, metrics=metrics)


def result(step: int, query: str) -> GroupClosed:
    """The same in every run: a function of the step and the query."""
    chance = Random(f"{step} {query}")
    solved = [chance.random() < 0.4 for _ in range(2)]
    dropped = "all rewards are equal" if solved[0] == solved[1] and chance.random() < 0.7 else ""
    places = tuple(sorted(chance.sample(range(FEATURES), 3)))
    root = PrefixEnd(places, chance.random(), 2, chance.random() - 0.4)
    prefixes = [root, PrefixEnd((1, 2), chance.random(), 1)]
    return replace(group(step, query, *solved, dropped=dropped), prefixes=prefixes)


@dataclass
class Driver:
    """Steps as under ``strict``: a step begins when the one before is rolled out, its checkpoint may come later.

    ``order``: decides in which order groups close and when checkpoints are made. ``drawn``: number and id of all
    queries, by step. ``weights``: of the predictor of each step's trees, and the price of their candidates. ``states``:
    of the checkpoints, as they come back from the disk.
    """

    queries: RunQueries
    order: Random
    saves: Sequence[int]
    drawn: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    figures: dict[int, dict[str, float]] = field(default_factory=dict)
    weights: dict[int, list[float] | None] = field(default_factory=dict)
    states: dict[int, QueriesState] = field(default_factory=dict)
    _pending: list[int] = field(default_factory=list)

    async def run(self, first: int, last: int) -> None:
        await self.queries.start()
        for step in range(first, last + 1):
            await self._step(Step(step))
            self.figures[step] = self.queries.end(Step(step))
            if step in self.saves or step == last:
                self._pending.append(step)
        while self._pending:
            await self._checkpoint()

    async def _step(self, step: Step) -> None:
        self.queries.begin(step, {PolicyName("solver"): Version(step)})
        self.drawn[step], still_open = [], []
        replacements = 0
        still_open += await self._draw(step, QUERIES)
        while still_open:
            if self._pending and self.order.random() < 0.3:
                await self._checkpoint()
            query = still_open.pop(self.order.randrange(len(still_open)))
            closed = result(step, query)
            assert not self.queries.closed(closed)
            if self.order.random() < 0.1:  # its worker is lost, and the group begins again
                self.queries.closed(closed)
            if closed.dropped and replacements < REPLACEMENTS:
                replacements += 1
                still_open += await self._draw(step, 1)

    async def _draw(self, step: Step, count: int) -> list[str]:
        async with self.queries.draw(step, count) as drawn:
            ids = [query.id for _, query in drawn]
            self.drawn[step] += [(number, query.id) for number, query in drawn]
            weights = self.queries.success_state(step)
            assert self.weights.setdefault(step, weights) == weights, "one predictor for all trees of a step"
        return ids

    async def _checkpoint(self) -> None:
        step = self._pending.pop(0)
        self.states[step] = from_disk(await self.queries.state_after(Step(step)))


def from_disk(state: QueriesState) -> QueriesState:
    return TypeAdapter(QueriesState).validate_python(json.loads(json.dumps(asdict(state))))
