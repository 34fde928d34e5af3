"""The lines of a recipe at which its tasks and threads stand."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.recipe.recipe_lines import (
    innermost_frames,
    line_of_error,
    lines_of_task,
    lines_of_threads,
)

from ...patience import PATIENCE_S

SOURCE = """import asyncio

async def leaf(event):
    await event.wait()

async def outer(event):
    await leaf(event)

async def gathered(event):
    await asyncio.gather(asyncio.sleep(0), leaf(event), other(event))

async def other(event):
    await event.wait()

async def group(event):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(leaf(event))
        tasks.create_task(other(event))

async def group_body(event):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.sleep(0))
        await leaf(event)

async def waited(event):
    await asyncio.wait([asyncio.ensure_future(leaf(event)), asyncio.ensure_future(other(event))])

async def limited(event):
    await asyncio.wait_for(leaf(event), 3600)

async def timed(event):
    async with asyncio.timeout(3600):
        await leaf(event)

async def shielded(event):
    await asyncio.shield(leaf(event))

async def parts(event):
    yield 1
    await event.wait()

async def generated(event):
    async for _ in parts(event):
        pass

async def next_one(event):
    await anext(parts(event))
    generator = parts(event)
    await anext(generator)
    await anext(generator, None)

class Awaitable:
    def __init__(self, event):
        self.event = event
    def __await__(self):
        return outer(self.event).__await__()

async def awaitable(event):
    await Awaitable(event)

async def nested(event):
    await asyncio.create_task(outer(event))

def blocking(begun, event):
    begun.set()
    event.wait()

async def tree(node, event):
    kind, children = node
    if kind == "leaf":
        await LEAVES[children](event)
    elif kind == "gather":
        await asyncio.gather(*(tree(child, event) for child in children))
    elif kind == "group":
        async with asyncio.TaskGroup() as tasks:
            for child in children:
                tasks.create_task(tree(child, event))
    else:
        await tree(children, event)

async def leaf_0(event):
    await event.wait()

async def leaf_1(event):
    await event.wait()

async def leaf_2(event):
    await event.wait()

LEAVES = [leaf_0, leaf_1, leaf_2]
"""


class Loaded:
    """The recipe of this page: its folder, its functions."""

    def __init__(self, folder: Path) -> None:
        file = folder / "workflow.py"
        file.write_text(SOURCE)
        self.folder = folder
        self.names: dict[str, Any] = {}
        exec(compile(SOURCE, str(file), "exec"), self.names)

    async def lines(self, function: str, *arguments: object) -> list[str]:
        """The lines at which ``function`` stands, when it waits for an event that never comes."""
        async with Suspended(self.names[function](*arguments, asyncio.Event())) as task:
            return lines_of_task(self.folder, task)


class Suspended:
    """A task that has run until nothing of it runs any more."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self.task = asyncio.ensure_future(work)

    async def __aenter__(self) -> "asyncio.Task[None]":
        for _ in range(50):
            await asyncio.sleep(0)
        return self.task

    async def __aexit__(self, *_: object) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks | {self.task})


@pytest.fixture
def recipe(tmp_path: Path) -> Loaded:
    return Loaded(tmp_path)


LEAF = "workflow.py:4, in leaf: await event.wait()"
OTHER = "workflow.py:13, in other: await event.wait()"


@pytest.mark.parametrize(
    ("function", "lines"),
    {
        "outer": [LEAF],
        "gathered": [LEAF, OTHER],
        "group": [LEAF, OTHER],
        "group_body": [LEAF],
        "waited": [LEAF, OTHER],
        "limited": [LEAF],
        "timed": [LEAF],
        "shielded": [LEAF],
        "generated": ["workflow.py:40, in parts: await event.wait()"],
        "next_one": ["workflow.py:40, in parts: await event.wait()"],
        "awaitable": [LEAF],
        "nested": [LEAF],
    }.items(),
)
async def test_the_innermost_lines_are_named(recipe: Loaded, function: str, lines: list[str]) -> None:
    assert sorted(await recipe.lines(function)) == sorted(lines)


async def test_a_task_that_has_ended_or_is_not_the_recipes_stands_nowhere(recipe: Loaded) -> None:
    event = asyncio.Event()
    async with Suspended(event.wait()) as task:  # type: ignore[arg-type]  # it returns True
        assert lines_of_task(recipe.folder, task) == []
        assert [frame.f_code.co_name for frame in innermost_frames(recipe.folder, task)] == ["wait"]
        event.set()
        await task
        assert lines_of_task(recipe.folder, task) == []
        assert innermost_frames(recipe.folder, task) == []


async def test_tasks_that_wait_for_each_other_are_looked_at_once(recipe: Loaded) -> None:
    tasks: list[asyncio.Task[None]] = []

    async def waiting(other: int) -> None:
        await asyncio.wait([tasks[other]])

    tasks += [asyncio.ensure_future(waiting(1)), asyncio.ensure_future(waiting(0))]
    async with Suspended(asyncio.sleep(3600)):
        assert lines_of_task(recipe.folder, tasks[0]) == []


async def test_the_frames_lead_to_the_recipe_through_a_gather(recipe: Loaded) -> None:
    async with Suspended(recipe.names["gathered"](asyncio.Event())) as task:
        names = [frame.f_code.co_name for frame in innermost_frames(recipe.folder, task)]
    assert names[0] == "gathered" and names[1] in ("leaf", "other")


async def test_a_task_that_runs_stands_at_its_present_line(recipe: Loaded) -> None:
    """As when a report is made in the midst of a task that was not suspended: nothing fails."""
    task = asyncio.current_task()
    assert task is not None
    assert lines_of_task(recipe.folder, task) == []


def test_threads_stand_in_the_recipe_each_at_its_own_line(recipe: Loaded) -> None:
    assert lines_of_threads(recipe.folder) == []
    begun, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=recipe.names["blocking"], args=(begun, end))
    thread.start()
    try:
        assert begun.wait(PATIENCE_S)
        (line,) = lines_of_threads(recipe.folder)
        assert "in blocking: " in line
    finally:
        end.set()
        thread.join()
    assert lines_of_threads(recipe.folder) == []


Node = tuple[str, Any]


def trees() -> st.SearchStrategy[Node]:
    leaves = st.tuples(st.just("leaf"), st.integers(0, 2))

    def grown(children: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
        several = st.lists(children, min_size=1, max_size=3)
        kinds = st.sampled_from(["gather", "group"])
        return st.tuples(kinds, several) | st.tuples(st.just("call"), children)

    return st.recursive(leaves, grown, max_leaves=8)


def leaves_of(node: Node) -> set[int]:
    kind, children = node
    if kind == "leaf":
        return {children}
    return leaves_of(children) if kind == "call" else set().union(*map(leaves_of, children))


@pytest.fixture(scope="module")
def tree_recipe(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(tmp_path_factory.mktemp("recipe"))


@given(tree=trees())
@settings(max_examples=60)
def test_exactly_the_leaves_of_a_tree_of_tasks_are_named(tree_recipe: Loaded, tree: Node) -> None:
    lines = asyncio.run(tree_recipe.lines("tree", tree))
    names: Callable[[str], str] = lambda line: line.split(" in ")[1].split(":")[0]  # noqa: E731
    assert sorted(map(names, lines)) == [f"leaf_{leaf}" for leaf in sorted(leaves_of(tree))]


def test_the_line_of_an_error_is_the_innermost_of_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "workflow.py").write_text(
        "import json\n\ndef inner():\n    json.loads('?')\n\ndef outer():\n    inner()\n"
    )
    namespace: dict[str, Any] = {}
    source = (tmp_path / "workflow.py").read_text()
    exec(compile(source, str(tmp_path / "workflow.py"), "exec"), namespace)
    with pytest.raises(ValueError) as raised:
        namespace["outer"]()
    line = "workflow.py:4, in inner: json.loads('?')"
    assert line_of_error(tmp_path, raised.value) == line
    group = ExceptionGroup("both", [ExceptionGroup("first", [raised.value]), OSError()])
    assert line_of_error(tmp_path, group) == line
    assert line_of_error(tmp_path / "elsewhere", raised.value) is None
