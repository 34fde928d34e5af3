"""A workflow gets the text of a turn as it comes: in order, without gaps, and at last all of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from flexmarl.actors.errors import RecipeError
from flexmarl.actors.messages import GenerateRequest, Generation, Query, TextTo
from flexmarl.actors.names import AgentName, Version
from flexmarl.actors.rollout.turn_texts import TurnText, TurnTexts
from flexmarl.core.actor import endpoint
from flexmarl.core.system import ActorSystem

from ...patience import PATIENCE_S
from .fake_cluster import FakeCluster, FakeInstance, serve, start_step

QUERY = Query("q", "text")
SOLVER = AgentName("solver")
SHOWN = """
    shown = []
    turn = await agents["solver"].generate(query.text, on_text=shown.append)
    assert shown == {shown!r}, shown
    assert turn.text == {text!r}, turn.text
    return Rewards(solver=1.0)
"""


class Speaker(FakeInstance):
    """Sends ``parts``, each the offset and the text, and then answers with ``text``, unless it ``waits``."""

    def __init__(self, parts: list[tuple[int, str]], text: str, *, waits: bool = False) -> None:
        super().__init__(lambda request: (65,))
        self.parts, self.text, self.is_silent = parts, text, waits
        self.listened = 0
        self.cancelled = asyncio.Event()

    @endpoint
    async def generate(self, request: GenerateRequest, text_to: TextTo | None = None) -> Generation:
        try:
            if text_to is not None:
                self.listened += 1
                for start, text in self.parts:
                    await text_to.receiver.api.take_text(text_to.stream, start, text)
                await text_to.receiver.api.take_text(text_to.stream + 999, 0, "of another turn")
            if self.is_silent:
                await asyncio.sleep(3600.0)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return Generation(self.text, (1,), (65,), (-0.5,), request.versions.oldest, "stop")


@pytest.fixture
async def cluster(system: ActorSystem, private: Path) -> AsyncIterator[FakeCluster]:
    yield FakeCluster(system, private)


async def run(cluster: FakeCluster, speaker: Speaker, body: str) -> list[str]:
    """The errors of the trajectory."""
    cluster.instances["solver"] = [speaker]
    rollout = await cluster.open(body)
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 1, {"solver": 0, "judge": 0})
    group = await cluster.closed()
    return [failed.error for failed in group.failures]


async def test_parts_are_joined_and_the_answer_has_the_rest(cluster: FakeCluster) -> None:
    speaker = Speaker([(0, "once"), (4, " upon")], "once upon a time")
    body = SHOWN.format(shown=["once", "once upon", "once upon a time"], text="once upon a time")
    assert await run(cluster, speaker, body) == []


async def test_nothing_behind_a_lost_part_is_shown_before_the_answer(cluster: FakeCluster) -> None:
    speaker = Speaker([(0, "once"), (9, " a")], "once upon a")
    assert await run(cluster, speaker, SHOWN.format(shown=["once", "once upon a"], text="once upon a")) == []


async def test_all_of_the_text_is_shown_once(cluster: FakeCluster) -> None:
    speaker = Speaker([(0, "on"), (2, "ce")], "once")
    assert await run(cluster, speaker, SHOWN.format(shown=["on", "once"], text="once")) == []


async def test_an_empty_answer_is_shown_once(cluster: FakeCluster) -> None:
    assert await run(cluster, Speaker([], ""), SHOWN.format(shown=[""], text="")) == []


async def test_nothing_is_sent_unless_it_is_asked_for(cluster: FakeCluster) -> None:
    speaker = Speaker([(0, "once")], "once")
    body = 'await agents["solver"].generate(query.text); return Rewards(solver=1.0)'
    assert await run(cluster, speaker, body) == [] and speaker.listened == 0


async def test_an_error_of_the_listener_ends_the_turn_and_is_raised_by_it(cluster: FakeCluster) -> None:
    speaker = Speaker([(0, "once")], "once upon a time", waits=True)
    body = """
    def stop(text):
        raise ValueError("enough: " + text)
    await agents["solver"].generate(query.text, on_text=stop)
"""
    (error,) = await run(cluster, speaker, body)
    assert "enough: once" in error and "upon" not in error
    await asyncio.wait_for(speaker.cancelled.wait(), PATIENCE_S)


@pytest.mark.parametrize("listener", ["notes", Speaker.generate])
def test_a_listener_that_can_t_be_called_is_refused(listener: Callable[[str], None]) -> None:
    with pytest.raises(RecipeError, match="must be a plain function"):
        TurnText(listener)


async def test_what_an_earlier_instance_sends_late_is_of_no_turn() -> None:
    texts, shown = TurnTexts(), list[str]()
    text = TurnText(shown.append)
    with texts.opened(text) as first:
        pass
    answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
    with texts.opened(text) as second:
        listening = asyncio.create_task(text.listen(answer))
        await asyncio.sleep(0)
        texts.take(first, 0, "late")
        texts.take(second, 0, "new")
        assert shown == ["new"]
        texts.take(second, 0, "begun again")
        answer.set_result(Generation("", (), (), (), Version(0), "stop"))
        await listening
        texts.take(second, 11, " after the answer")
    assert shown == ["new", "begun again"]
