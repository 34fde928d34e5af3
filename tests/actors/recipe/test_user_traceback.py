"""A traceback begins with the lines of the recipe's author; the frames of the machinery are a number."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from flexmarl.actors.errors import InvalidReward
from flexmarl.actors.recipe.missing_await import await_hint, await_hint_of
from flexmarl.actors.recipe.recipe import module_of
from flexmarl.actors.recipe.user_traceback import headline, user_line, user_traceback
from flexmarl.actors.workflow import Rewards
from flexmarl.core.errors import RemoteError

CODE = """
import asyncio
import json
from flexmarl.actors.workflow import Rewards

def reward():
    return Rewards(solver=None)

def parse():
    try:
        return json.loads("{")
    except ValueError as error:
        raise KeyError("no answer") from error

def call(function):
    return function()

async def two():
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail("a"))
        tasks.create_task(fail("b"))

async def fail(name):
    raise ValueError(name)
"""


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    (tmp_path / "workflow.py").write_text(CODE)
    return module_of(tmp_path / "workflow.py", "flexmarl_test_tracebacks")


def raised(function: Callable[[], object]) -> Exception:
    try:
        function()
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError("it does not raise")


def test_the_frames_of_flexmarl_are_counted_behind_the_line_that_called_it(
    tmp_path: Path, module: ModuleType
) -> None:
    error = raised(module.reward)
    first, source, *_, more, last = user_traceback(error, tmp_path).splitlines()
    assert first == f'  File "{tmp_path}/workflow.py", line 7, in reward'
    assert source.strip() == "return Rewards(solver=None)"
    assert more == "  ... 2 frames of flexmarl; FLEXMARL_TRACEBACK=full shows them"
    assert last == f"flexmarl.actors.errors.InvalidReward: {error}"
    whole = user_traceback(error, tmp_path, whole=True)
    assert whole.startswith("Traceback") and "in _finite" in whole and "..." not in whole
    assert user_line(error, tmp_path) == "workflow.py:7, in reward: return Rewards(solver=None)"


def test_causes_and_other_libraries_are_shown(tmp_path: Path, module: ModuleType) -> None:
    shown = user_traceback(raised(module.parse), tmp_path)
    assert shown.index("line 11, in parse") < shown.index("in raw_decode")
    assert shown.index("JSONDecodeError") < shown.index("line 13, in parse") < shown.index("KeyError")
    assert "test_user_traceback" not in shown and "FLEXMARL_TRACEBACK" not in shown, (
        "nothing is left out behind it"
    )


def test_all_errors_of_a_group_are_shown_and_the_first_is_named(tmp_path: Path, module: ModuleType) -> None:
    error = raised(lambda: asyncio.run(module.two()))
    shown = user_traceback(error, tmp_path)
    assert "ValueError: a" in shown and "ValueError: b" in shown and "tasks.create_task" not in shown
    assert "1 frame of asyncio" in shown and "runners.py" not in shown
    text = headline("ExceptionGroup", str(error), error)
    assert text.startswith("ExceptionGroup: unhandled errors") and text.endswith(": ValueError: a")
    assert headline("ValueError", "a", ValueError("a")) == "ValueError: a"


def test_an_error_without_a_line_of_the_user_keeps_its_frames_unless_its_text_says_all(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine").mkdir()
    folder = tmp_path / "mine"
    (tmp_path / "broken.py").write_text("def broken(:")
    syntax = raised(lambda: module_of(tmp_path / "broken.py", "flexmarl_test_broken"))
    assert user_traceback(syntax.with_traceback(None), folder).startswith(
        f'  File "{tmp_path}/broken.py", line 1'
    )
    own = raised(lambda: Rewards(solver=None))  # type: ignore[arg-type]
    assert isinstance(own, InvalidReward)
    assert (
        user_traceback(own.with_traceback(None), folder) == f"flexmarl.actors.errors.InvalidReward: {own}\n"
    )
    assert user_line(own, folder) == ""
    defect = raised(lambda: Rewards(metrics=1))  # type: ignore[arg-type]
    trace = defect.__traceback__
    while trace is not None and "workflow" not in trace.tb_frame.f_code.co_filename:
        trace = trace.tb_next
    shown = user_traceback(defect.with_traceback(trace), None)
    assert "in __init__" in shown and "FLEXMARL_TRACEBACK" not in shown


def test_the_answer_of_another_actor_is_no_cause_for_the_user_to_read(tmp_path: Path) -> None:
    error = InvalidReward("no")
    error.__cause__ = RemoteError("store", "put", "InvalidReward", "no", "frames of the store")
    assert user_traceback(error, tmp_path) == "flexmarl.actors.errors.InvalidReward: no\n"


async def test_a_forgotten_await_is_named() -> None:
    async def turn() -> str:
        return ""

    coroutine = turn()
    task = asyncio.create_task(turn())
    hint = "; is `await` missing?"
    mistakes: list[Callable[[], object]] = [
        lambda: coroutine.text,  # type: ignore[attr-defined]
        lambda: coroutine[0],  # type: ignore[index]
        lambda: float(coroutine),  # type: ignore[arg-type]
        lambda: list(coroutine),  # type: ignore[call-overload]
        lambda: task.text,  # type: ignore[attr-defined]
    ]
    for mistake in mistakes:
        assert await_hint_of(raised(mistake)) == hint
    assert await_hint(coroutine) == hint and await_hint(task) == hint
    assert await_hint("text") == "" and await_hint_of(raised(lambda: json.loads("{"))) == ""
    with pytest.raises(InvalidReward, match="it must be a finite number; is `await` missing"):
        Rewards(solver=coroutine)  # type: ignore[arg-type]
    await coroutine
    await task
