"""A session's calls: refusals, changed options, templates that rewrite turns, and the turns that are trained."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from flexmarl.actors.deadline import Deadline
from flexmarl.actors.errors import LimitReached, TurnsRewritten
from flexmarl.actors.gateway.answer import Answer
from flexmarl.actors.gateway.model_call import ApiError, Message, ModelCall
from flexmarl.actors.gateway.session import MOST_OPEN_CALLS, Session
from flexmarl.actors.gateway.trajectory_programs import ProgramSampling, TrajectoryPrograms
from flexmarl.core.testing import virtual_time

from .scripted_agents import ScriptedAgent

ASK = {"role": "user", "content": "1 + 2?"}
MORE = {"role": "user", "content": "and 4?"}


def session_of(*agents: ScriptedAgent, programs: TrajectoryPrograms | None = None) -> Session:
    return Session({agent.name: agent for agent in agents}, {}, programs)


def answered(answer: Answer) -> Message:
    return answer.message()


async def ask(session: Session, *messages: Message, model: str = "solver", **options: Any) -> Answer:
    (answer,) = await session.answer(ModelCall(model, messages, options=options))
    return answer


def play(body: Coroutine[Any, Any, None]) -> None:
    virtual_time.run(body)


def training(solver: int = 64) -> TrajectoryPrograms:
    return TrajectoryPrograms({"solver": ProgramSampling(solver, is_training=True)})


def test_more_tokens_than_the_agent_may_have_are_fewer() -> None:
    async def body() -> None:
        solver = ScriptedAgent("solver", "3", "3")
        session = session_of(solver, programs=training(64))
        await ask(session, ASK, max_new_tokens=4096)
        await ask(session, ASK, max_new_tokens=16)
        assert [options["max_new_tokens"] for options in solver.options] == [64, 16]
        assert session.counts["capped"] == 1

    play(body())


@pytest.mark.parametrize("is_training", [True, False])
def test_temperature_0_is_for_evaluations(is_training: bool) -> None:
    async def body() -> None:
        solver = ScriptedAgent("solver", "3", "3")
        programs = TrajectoryPrograms({"solver": ProgramSampling(64, is_training)})
        session = session_of(solver, programs=programs)
        await ask(session, ASK, temperature=0)
        await ask(session, ASK, temperature=0.5)
        assert solver.options[0] == ({} if is_training else {"temperature": 0})
        assert solver.options[1] == {"temperature": 0.5}
        assert session.counts["warmed"] == int(is_training)

    play(body())


def test_a_limit_of_the_trajectory_refuses_and_is_kept_for_its_end() -> None:
    async def body() -> None:
        limit = LimitReached("solver", "rollout.trajectory_turns", 1)
        session = session_of(ScriptedAgent("solver", "3", limit))
        await ask(session, ASK)
        with pytest.raises(ApiError) as refused:
            await ask(session, MORE)
        assert (refused.value.status, refused.value.code) == (400, "limit_reached")
        assert "rollout.trajectory_turns=1" in session.refusal
        assert session.error is None, "the program may end well"

    play(body())


def test_a_template_that_rewrites_turns_makes_a_branch() -> None:
    async def body() -> None:
        rewritten = TurnsRewritten("q_1", "the chat template rewrites earlier turns")
        solver = ScriptedAgent("solver", "3", rewritten, "7", "8")
        session = session_of(solver)
        first = await ask(session, ASK)
        second = await ask(session, ASK, answered(first), MORE)
        assert solver.prompts[2] == [ASK, answered(first), MORE], "its messages, without a turn"
        assert solver.options[2] == {"retokenize": True}
        await ask(session, ASK, answered(first), MORE, answered(second), MORE)
        assert solver.prompts[3] == [second.turn, MORE], "the branch continues"
        assert session.counts == {"begun": 1, "branched": 1, "merged": 1, "retokenized": 1}

    play(body())


def test_arguments_of_calls_are_objects_for_the_template() -> None:
    async def body() -> None:
        solver = ScriptedAgent("solver", "7")
        function = {"name": "add", "arguments": '{"a": 1}'}
        calling = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }
        result = {"role": "tool", "tool_call_id": "c", "content": "3"}
        await ask(session_of(solver), ASK, calling, result)
        assert solver.prompts[0][1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}

    play(body())


async def _two_chains(session: Session) -> list[Answer]:
    """A conversation of two turns, a title, and a second continuation of the first turn."""
    first = await ask(session, ASK)
    title = await ask(session, {"role": "user", "content": "a title"})
    second = await ask(session, ASK, answered(first), MORE)
    branch = await ask(session, ASK, answered(first), ASK)
    return [first, title, second, branch]


@pytest.mark.parametrize(
    ("rule", "left_out"),
    [("all", []), ("main", [1, 3]), (lambda turn: turn.text != "second", [2])],
)
def test_turns_that_the_rule_does_not_train_are_left_out(rule: Any, left_out: list[int]) -> None:
    async def body() -> None:
        session = session_of(ScriptedAgent("solver", "first", "title", "second", "branch"))
        answers = await _two_chains(session)
        session.leave_out({"solver": rule})
        assert session.programs.left_out == {answers[number].turn.sample_id for number in left_out}
        assert session.counts["masked"] == len(left_out)

    play(body())


def test_the_time_of_answers_is_not_the_programs() -> None:
    async def body() -> None:
        solver = ScriptedAgent("solver", "3")
        solver.held = asyncio.Event()
        session = session_of(solver)
        deadline = Deadline(10.0)
        with session.limited(deadline):
            call = asyncio.create_task(ask(session, ASK))
            await asyncio.sleep(100.0)
            assert not deadline.overran.done()
            solver.held.set()
            await call
            await asyncio.sleep(11.0)
            assert deadline.overran.done()

    play(body())


def test_calls_have_a_limit_of_number() -> None:
    async def body() -> None:
        solver = ScriptedAgent("solver", *["3"] * (MOST_OPEN_CALLS + 1))
        solver.held = asyncio.Event()
        session = session_of(solver)
        calls = [asyncio.create_task(ask(session, ASK)) for _ in range(MOST_OPEN_CALLS)]
        while len(solver.prompts) < MOST_OPEN_CALLS:
            await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await ask(session, ASK)
        assert (refused.value.status, refused.value.code) == (429, "too_many_calls")
        solver.held.set()
        await asyncio.gather(*calls)
        assert (await ask(session, ASK)).content == "3"

    play(body())


def test_a_session_that_has_ended_refuses() -> None:
    async def body() -> None:
        session = session_of(ScriptedAgent("solver", "3"))
        await session.close()
        with pytest.raises(ApiError) as refused:
            await ask(session, ASK)
        assert refused.value.status == 410
        assert session.turns == []

    play(body())
