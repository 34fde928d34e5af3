"""The queries of a run: the same ones in the same order, also if the run is killed and continues; what the source hears
and when; what may go wrong in a recipe's own source."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.errors import DataChanged, RecipeError
from flexmarl.actors.messages import GroupClosed, Query
from flexmarl.actors.names import Step
from flexmarl.actors.orchestrator.queries.queries_state import QueriesState
from flexmarl.actors.orchestrator.queries.run_queries import RunQueries
from flexmarl.actors.recipe.recipe import Recipe
from flexmarl.actors.recipe.sources.band_source import BandConfig
from flexmarl.actors.recipe.sources.plain_source import PlainSourceConfig
from flexmarl.actors.recipe.sources.rare_success_source import RareSuccessConfig
from flexmarl.actors.recipe.sources.source_config import SourceConfig
from flexmarl.actors.recipe.sources.variance_source import VarianceConfig
from flexmarl.actors.trees.success_model import SuccessModel
from flexmarl.core.system import ActorSystem

from ....patience import PATIENCE_S
from .query_driver import Driver, from_disk, group, plan, queries_of, recipe_of

LAST = 7
REPLAY = """
from flexmarl.actors import ReplaySource

def query_source(positions, seed):
    return ReplaySource(positions, share=0.4, limit=3, times=2)
"""
LEVELS = """
from flexmarl.actors import QuerySource

class Levels(QuerySource):
    '''Harder when the last step was easy; its mean is a float, which depends on the order of its terms.'''

    def __init__(self):
        self.level, self.given, self.mean, self.heard = 1, 0, 0.5, []

    def next(self, step):
        self.given += 1
        return Query(f"l{self.level}-{self.given}", f"step {step}, mean {self.mean!r}")

    def closed(self, group):
        self.heard.append([group.query.id, group.step, group.success])
        self.mean = 0.9 * self.mean + 0.1 * group.success
        self.level = 1 + round(10 * self.mean)

    def state(self):
        return {"level": self.level, "given": self.given, "mean": self.mean, "heard": self.heard}

    def restore(self, state):
        self.level, self.given, self.mean, self.heard = (state[k] for k in ("level", "given", "mean", "heard"))

    def figures(self):
        return {"level": self.level}

def query_source(positions, seed):
    return Levels()
"""
SOURCES = {"positions": "", "replay": REPLAY, "levels": LEVELS}
NAMED: dict[str, SourceConfig] = {
    "variance": VarianceConfig(pool=9, fresh=0.2),
    "rare successes": RareSuccessConfig(pool=9),
    "band": BandConfig(pool=9, fresh=0.0),
}


@pytest.fixture(params=[*SOURCES, *NAMED], scope="module")
def recipe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    name = request.param
    queries = NAMED.get(name, PlainSourceConfig())
    return recipe_of(tmp_path_factory.mktemp(name.replace(" ", "_")), SOURCES.get(name, ""), queries)


def played(
    recipe: Recipe, every: int, order: Random, first: int = 1, resumed: QueriesState | None = None
) -> Driver:
    saves = [step for step in range(1, LAST + 1) if step % every == 0]
    driver = Driver(queries_of(recipe, every, resumed), order, saves)
    asyncio.run(driver.run(first, LAST))
    return driver


@settings(max_examples=25)
@given(every=st.integers(1, 4), one=st.randoms(use_true_random=True), other=st.randoms(use_true_random=True))
def test_a_run_that_was_killed_gets_the_queries_of_one_that_was_not(
    recipe: Recipe, every: int, one: Random, other: Random
) -> None:
    """Groups close in any order, and the next step has come any distance when the checkpoint is made."""
    whole = played(recipe, every, one)
    assert sorted(whole.states) == sorted({*range(every, LAST + 1, every), LAST})
    numbers = [number for step in whole.drawn.values() for number, _ in step]
    assert numbers == [*range(len(numbers))]
    first, last = (whole.weights[step] or [] for step in (1, LAST))
    assert first == SuccessModel().state and any(last[:-1]) and last[-1] != 1.0, "it learns from the groups"
    for step, state in whole.states.items():
        again = played(recipe, every, other, step + 1, state)
        later = range(step + 1, LAST + 1)
        assert again.drawn == {number: whole.drawn[number] for number in later}
        assert again.figures == {number: whole.figures[number] for number in later}
        assert again.weights == {number: whole.weights[number] for number in later}
        assert again.states == {number: whole.states[number] for number in whole.states if number > step}


def test_a_replay_gives_unsolved_queries_again(tmp_path: Path) -> None:
    driver = played(recipe_of(tmp_path, REPLAY), 1, Random(1))
    ids = [query for step in driver.drawn.values() for _, query in step]
    again = [query for query in ids if "#" in query]
    assert 0.2 < len(again) / len(ids) <= 0.4 and driver.figures[LAST]["given_again"] == len(again)
    assert {query.partition("#")[0] for query in again} < set(ids)


async def heard_by(queries: Any, step: int) -> list[list[Any]]:
    state = from_disk(await queries.state_after(Step(step)))
    assert state.source is not None
    return list(state.source["heard"])


async def test_a_source_hears_of_each_group_once_in_the_order_of_the_queries(tmp_path: Path) -> None:
    queries = queries_of(recipe_of(tmp_path, LEVELS), save_every=0)
    await queries.start()
    queries.begin(Step(1), {})
    async with queries.draw(Step(1), 3) as drawn:
        ids = [query.id for _, query in drawn]
    queries.closed(group(1, ids[2], True))
    queries.closed(group(1, ids[0], failures=2, dropped="all failed"))
    queries.closed(group(1, ids[0], False, True))  # it has begun again
    async with queries.draw(Step(1), 1) as drawn:  # a replaced group: the source has heard of nothing
        (_, replacement) = drawn[0]
    assert replacement.text == "step 1, mean 0.5"
    queries.closed(group(1, ids[1], False))
    queries.closed(group(1, replacement.id, True))
    queries.begin(Step(2), {})
    async with queries.draw(Step(2), 1) as drawn:
        assert drawn[0][0] == 4
        queries.closed(group(1, ids[1], True))  # its samples are lost, and it has closed again: too late
        queries.closed(group(2, drawn[0][1].id, True))
    queries.end(Step(1))
    expected = [[ids[0], 1, 0.5], [ids[1], 1, 0.0], [ids[2], 1, 1.0], [replacement.id, 1, 1.0]]
    assert await heard_by(queries, 2) == [*expected, [drawn[0][1].id, 2, 1.0]]


async def test_the_state_of_a_step_is_taken_once_also_if_its_checkpoint_comes_before_the_next_step(
    tmp_path: Path,
) -> None:
    code = LEVELS.replace(
        "    def state(self):\n", "    def state(self):\n        taken.append(self.given)\n"
    )
    recipe = recipe_of(tmp_path, "taken = []\nget_taken = taken.copy\n" + code)
    queries = queries_of(recipe)
    await queries.start()
    for step in map(Step, range(1, 4)):
        queries.begin(step, {})
        async with queries.draw(step, 2) as draws:
            for _, query in draws:
                queries.closed(group(step, query.id, True))
        queries.end(step)
        await queries.state_after(step)
    assert recipe.function("get_taken")() == [2, 4, 6]


async def test_submitted_queries_take_the_place_of_drawn_ones_which_no_source_hears_of(
    tmp_path: Path,
) -> None:
    queries = queries_of(recipe_of(tmp_path, LEVELS))
    await queries.start()
    answers = asyncio.ensure_future(queries.submissions.submit([Query("mine", "2+2")]))
    await asyncio.sleep(0)
    (submitted,) = queries.begin(Step(1), {})
    async with queries.draw(Step(1), 1) as drawn:
        assert drawn[0][0] == 0
    assert queries.closed(group(1, submitted.id, True))
    assert queries.closed(group(1, submitted.id, False)), "it has begun again"
    assert not queries.closed(group(1, drawn[0][1].id, True))
    (answer,) = await answers
    assert answer.query == submitted.id == "mine" and not answer.dropped
    assert await heard_by(queries, 1) == [[drawn[0][1].id, 1, 1.0]]


async def test_a_drawn_query_with_the_id_of_a_submitted_one_is_left_out(tmp_path: Path) -> None:
    queries = queries_of(recipe_of(tmp_path, ""))
    await queries.start()
    answers = asyncio.ensure_future(queries.submissions.submit([Query("q1", "2+2"), Query("q3", "2+2")]))
    await asyncio.sleep(0)
    assert len(queries.begin(Step(1), {})) == 2
    async with queries.draw(Step(1), 2) as drawn:
        assert [(number, query.id) for number, query in drawn] == [(0, "q0"), (2, "q2")]
    async with queries.draw(Step(1), 1) as drawn:  # a replaced group
        assert [(number, query.id) for number, query in drawn] == [(4, "q4")]
    queries.closed(group(1, "q1", True))
    queries.closed(group(1, "q3", True))
    assert [answer.query for answer in await answers] == ["q1", "q3"]
    queries.begin(Step(2), {})
    async with queries.draw(Step(2), 1) as drawn:
        assert [number for number, _ in drawn] == [5]


async def test_a_source_hears_of_the_queries_that_are_left_out_and_may_give_them_again(
    tmp_path: Path,
) -> None:
    code = """
from flexmarl.actors import QuerySource

class Stubborn(QuerySource):
    def __init__(self): self.given, self.heard = 0, []
    def next(self, step):
        self.given += 1
        return Query("hard" if self.given % 4 else f"easy-{self.given}", "1+1")
    def closed(self, group): self.heard.append([group.query.id, group.step, group.dropped])
    def state(self): return {"heard": self.heard}
    def restore(self, state): pass

def query_source(positions, seed): return Stubborn()
"""
    queries = queries_of(recipe_of(tmp_path, code))
    await queries.start()
    answers = asyncio.ensure_future(queries.submissions.submit([Query("hard", "2+2")]))
    await asyncio.sleep(0)
    queries.begin(Step(1), {})
    async with queries.draw(Step(1), 2) as drawn:
        assert [(number, query.id) for number, query in drawn] == [(3, "easy-4"), (7, "easy-8")]
    for name in ("hard", "easy-4", "easy-8"):
        queries.closed(group(1, name, True))
    await answers
    out = ["hard", 1, "left out: a submitted query of the step has its id"]
    assert await heard_by(queries, 1) == [*[out] * 3, ["easy-4", 1, ""], *[out] * 3, ["easy-8", 1, ""]]


async def test_a_source_that_gives_one_id_for_ever_ends_the_run_also_if_it_is_submitted(
    tmp_path: Path,
) -> None:
    code = """
from flexmarl.actors import QuerySource

class Same(QuerySource):
    def next(self, step): return Query("same", "1+1")
    def state(self): return {}
    def restore(self, state): pass

def query_source(positions, seed): return Same()
"""
    queries = queries_of(recipe_of(tmp_path, code))
    await queries.start()
    answers = asyncio.ensure_future(queries.submissions.submit([Query("same", "2+2")]))
    await asyncio.sleep(0)
    queries.begin(Step(1), {})
    with pytest.raises(RecipeError, match="two queries with the id 'same': give each an id of its own"):
        async with queries.draw(Step(1), 1):
            pass
    answers.cancel()


@pytest.mark.parametrize(
    ("metric", "closed", "share"),
    [
        ("accuracy", group(1, "q", True, False, True, True, failures=3), 0.75),
        ("accuracy", group(1, "q", failures=3), None),
        ("reward/solver", group(1, "q", True, False), 0.5),
        ("reward/judge", group(1, "q", True, False), None),
        ("other", group(1, "q", True, False), None),
    ],
)
async def test_the_success_of_a_group(
    tmp_path: Path, metric: str, closed: GroupClosed, share: float | None
) -> None:
    code = LEVELS.replace("0.1 * group.success", "0.1")
    queries = queries_of(recipe_of(tmp_path, code))
    queries._success = metric
    await queries.start()
    queries.begin(Step(1), {})
    async with queries.draw(Step(1), 1) as drawn:
        name = drawn[0][1].id
    queries.closed(
        GroupClosed(Step(1), name, {}, {}, 0.0, closed.rewards, closed.failures, metrics=closed.metrics)
    )
    assert await heard_by(queries, 1) == [[name, 1, share]]


async def test_a_source_that_hangs_is_named_and_the_checkpoint_before_does_not_wait(
    system: ActorSystem, tmp_path: Path
) -> None:
    code = LEVELS.replace("    def next(self, step):\n", "    def next(self, step):\n        wait(step)\n")
    waits = "gate = __import__('threading').Event()\ndef wait(step): step == 2 and gate.wait()\nopen_gate = gate.set\n"
    recipe = recipe_of(tmp_path, waits + code)
    queries = RunQueries(recipe, lambda: cast(Any, system), PATIENCE_S, plan(save_every=1), "accuracy", None)
    await queries.start()
    queries.begin(Step(1), {})
    async with queries.draw(Step(1), 1) as draws:
        name = draws[0][1].id
    queries.closed(group(1, name, True))
    queries.begin(Step(2), {})
    draw = asyncio.ensure_future(queries.draw(Step(2), 1).__aenter__())
    while not any("Levels.next of workflow.py, at workflow.py" in wait.text for wait in queries.waits()):
        await asyncio.sleep(0.001)
    assert await heard_by(queries, 1) == [[name, 1, 1.0]]
    recipe.function("open_gate")()
    ((number, _),) = await draw
    assert number == 1


# --------------------------------------------------------------------------- mistakes of a recipe

BAD = """
from flexmarl.actors import QuerySource

class Bad(QuerySource):
    def next(self, step):
        return {next}
    def closed(self, group):
        {closed}
    def state(self):
        return {state}
    def restore(self, state):
        {restore}
    def figures(self):
        return {figures}

def query_source(positions, seed):
    return {made}
"""
RIGHT = {
    "next": "Query('q', 'text')",
    "closed": "pass",
    "state": "{}",
    "restore": "pass",
    "figures": "{}",
    "made": "Bad()",
}
PLAIN = r"Bad.state must give a dictionary of plain data: .*; "


async def one_step(queries: Any) -> None:
    await queries.start()
    queries.begin(Step(1), {})
    async with queries.draw(Step(1), 1):
        queries.closed(group(1, "q", True))
    await queries.state_after(Step(1))


@pytest.mark.parametrize(
    ("part", "code", "words"),
    [
        ("made", "object()", r"workflow.py: query_source returns object, not a flexmarl.QuerySource"),
        ("made", "1 / 0", r"query_source failed: ZeroDivisionError(.|\n)*in query_source"),
        ("next", "None", r"Bad.next gives NoneType, not a Query"),
        ("next", "1 / 0", r"Bad.next failed: ZeroDivisionError(.|\n)*in next"),
        ("closed", "1 / 0", r"Bad.closed failed: ZeroDivisionError"),
        ("restore", "state['level']", r"Bad.restore failed: KeyError"),
        ("state", "[1]", rf"{PLAIN}it gives list"),
        ("state", "{'a': [{1: 2}]}", rf"{PLAIN}it gives the key 1 in 'a'"),
        ("state", "{'a': {'b': (1, 2)}}", rf"{PLAIN}it gives tuple in 'b' in 'a'"),
        ("state", "{'a': {1}}", rf"{PLAIN}.*set is not JSON serializable"),
        ("state", "{'a': float('nan')}", rf"{PLAIN}.*not JSON compliant"),
        ("figures", "{'a': 'b'}", r"Bad.figures gives 'a': 'b', not a name and a finite number"),
        ("figures", "{'a': float('inf')}", r"Bad.figures gives 'a': inf"),
    ],
)
async def test_mistakes_are_named(tmp_path: Path, part: str, code: str, words: str) -> None:
    recipe = recipe_of(tmp_path, BAD.format(**{**RIGHT, part: code}))
    resumed = QueriesState(source={}) if part == "restore" else None
    with pytest.raises(RecipeError, match=words):
        await one_step(queries_of(recipe, resumed=resumed))


async def test_two_queries_of_a_step_with_one_id_are_refused(tmp_path: Path) -> None:
    queries = queries_of(recipe_of(tmp_path, BAD.format(**RIGHT)))
    await one_step(queries)
    with pytest.raises(RecipeError, match="step 1 has two queries with the id 'q'"):
        async with queries.draw(Step(1), 1):
            pass
    queries.begin(Step(2), {})
    async with queries.draw(Step(2), 1):
        pass  # in another step it may come again


# --------------------------------------------------------------------------- data that has changed


async def test_changed_data_is_refused_unless_it_is_accepted(tmp_path: Path) -> None:
    queries = queries_of(recipe_of(tmp_path, REPLAY))
    await queries.start()
    await queries.evaluation()
    queries.begin(Step(1), {})
    async with queries.draw(Step(1), 3):
        pass
    state = from_disk(await queries.state_after(Step(1)))
    for changed, words in (
        ("def eval_queries(seed): return []", "eval_queries now returns other"),
        (
            "def train_query(position, seed): return Query('q7', '')",
            r"train_query\(0\) now returns the query 'q7'",
        ),
    ):
        recipe = recipe_of(tmp_path, f"{REPLAY}\n{changed}")
        with pytest.raises(DataChanged, match=words):
            await queries_of(recipe, resumed=state).start()
        await queries_of(recipe, resumed=state.without_digests()).start()
    await queries_of(recipe_of(tmp_path, REPLAY), resumed=state).start()


async def test_without_train_query_a_source_may_still_be_the_recipes_own(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, LEVELS + "\ndel train_query\n")
    await one_step_of_levels(recipe)
    with pytest.raises(RecipeError, match="workflow.py defines no function 'train_query'"):
        await one_step(queries_of(recipe_of(tmp_path, REPLAY + "\ndel train_query\n")))


async def one_step_of_levels(recipe: Recipe) -> None:
    queries = queries_of(recipe)
    await queries.start()
    queries.begin(Step(1), {})
    async with queries.draw(Step(1), 2) as drawn:
        assert [query.id for _, query in drawn] == ["l1-1", "l1-2"]
    assert queries.end(Step(1)) == {"level": 1}
