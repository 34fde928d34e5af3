"""Trajectories along a demonstration: turns that the environment takes, prompts behind a patch, rewards, ends."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from flexmarl.actors.demonstrations.chance import ChanceRule
from flexmarl.actors.demonstrations.demonstration import Demonstration
from flexmarl.actors.demonstrations.patch_rule import PatchRule
from flexmarl.actors.demonstrations.threshold import ThresholdRule
from flexmarl.actors.environments.demonstrated_play import DemonstratedEnd, follow_problem, play_demonstrated
from flexmarl.actors.environments.environment import Environment
from flexmarl.actors.environments.patched_turn import as_written, patch_turn
from flexmarl.actors.errors import InvalidEnvironment, LimitReached
from flexmarl.actors.messages import Query
from flexmarl.actors.rollout.prompts import prompt_parts, segments_and_chat
from flexmarl.actors.rollout.turn_options import NO_OPTIONS
from flexmarl.actors.workflow import Rewards, Turn

QUERY = Query("q", "begin")
ALL = ThresholdRule(file="", most=None)


class Answers:
    """An agent with these answers. ``prompts``: as it was asked."""

    def __init__(self, agent: str, texts: Sequence[str]) -> None:
        self.prompts: list[Any] = []
        self._agent, self._texts = agent, texts

    async def generate(self, prompt: Any, **options: Any) -> Turn:
        number = len(self.prompts)
        if number == len(self._texts):
            raise LimitReached(self._agent, "rollout.trajectory_turns", number)
        self.prompts.append(prompt)
        await asyncio.sleep(0)
        prompt_tokens, tokens = (1, 2, number), (50 + number,)
        sample_id = f"1:q_{number}_{self._agent}"
        return Turn(self._agent, self._texts[number], prompt_tokens, tokens, sample_id, logprobs=(-1.0,))


class Walk(Environment):
    """Takes three turns of each agent, at once, and pays what it took."""

    opened: ClassVar[list["Walk"]] = []

    async def reset(self, query: Query) -> Any:
        Walk.opened.append(self)
        self.took: list[dict[str, str]] = []
        self.ends = 0
        self.agents = query.data.get("agents", ["solver"])
        return dict.fromkeys(self.agents, query.text)

    async def step(self, turns: Mapping[str, Turn]) -> Any:
        assert {agent: self.turns[agent][-1] for agent in turns} == turns
        self.took.append({agent: turn.text for agent, turn in turns.items()})
        if len(self.took) < 3:
            return dict.fromkeys(self.agents, f"round {len(self.took)}")
        rewards = Rewards(metrics={"accuracy": 1.0}, **dict.fromkeys(self.agents, 100.0))
        return rewards.of(turns["solver"], 50.0)

    async def end(self) -> None:
        self.ends += 1


@pytest.fixture(autouse=True)
def opened() -> list[Walk]:
    Walk.opened = []
    return Walk.opened


async def played(
    answers: str, actions: str, rule: PatchRule, cls: type[Environment] = Walk
) -> tuple[DemonstratedEnd, list[Any]]:
    solver = Answers("solver", answers)
    demonstration = Demonstration({"solver": tuple(actions)}, "walks.jsonl, line 3")
    end = await play_demonstrated(cls(), QUERY, {"solver": solver}, demonstration, rule)
    return end, solver.prompts


def of_turns(rewards: Rewards) -> dict[str, float]:
    return {turn.sample_id: amount for turn, amount in rewards.turns}


async def test_the_environment_takes_recorded_actions_and_the_agreement_is_paid(opened: list[Walk]) -> None:
    end, prompts = await played("axc", "abc", ALL)
    assert opened[0].took == [{"solver": "a"}, {"solver": "b"}, {"solver": "c"}] and opened[0].ends == 1
    assert end.rewards.by_agent == {"solver": 2 / 3}, "the environment's 100 is not the policy's"
    assert of_turns(end.rewards) == {"1:q_0_solver": 1.0, "1:q_1_solver": 0.0, "1:q_2_solver": 1.0}
    assert [turn.text for turn, _ in end.rewards.turns] == ["a", "x", "c"], (
        "the turns of the policy are trained"
    )
    assert end.rewards.metrics == {"followed": 1 / 3}
    assert end.figures == {"demonstrated_trajectories": 1, "patched_turns": 1, "departed_trajectories": 0}
    own, after = prompts[1], prompts[2]
    assert isinstance(own[0], Turn) and own[0].tokens == (50,), "a turn that agrees continues by its tokens"
    assert [part if isinstance(part, str) else part.prompt_tokens + part.tokens for part in after] == [
        (1, 2, 1), "b", "round 2",
    ]  # fmt: skip


async def test_a_departure_beyond_the_patches_ends_the_trajectory_and_is_a_sample(opened: list[Walk]) -> None:
    end, _ = await played("xyc", "abc", ThresholdRule(file="", most=1))
    assert opened[0].took == [{"solver": "a"}] and opened[0].ends == 1
    assert of_turns(end.rewards) == {"1:q_0_solver": 0.0, "1:q_1_solver": 0.0}
    assert end.rewards.by_agent == {"solver": 0.0} and end.rewards.metrics == {"followed": 0.0}
    assert end.figures == {"demonstrated_trajectories": 1, "patched_turns": 1, "departed_trajectories": 1}


async def test_a_whole_agreement_has_the_discounted_returns() -> None:
    end, _ = await played("abc", "abc", ThresholdRule(file="", most=0, decay=0.5))
    assert [*of_turns(end.rewards).values()] == [1.75, 1.5, 1.0]
    assert end.rewards.by_agent == {"solver": 1.0} and end.rewards.metrics == {"followed": 1.0}


async def test_agents_that_are_asked_at_once_depart_one_by_one(opened: list[Walk]) -> None:
    agents = {"solver": Answers("solver", "axc"), "judge": Answers("judge", "xyz")}
    demonstration = Demonstration({"solver": tuple("abc"), "judge": tuple("xbz")}, "")
    query = replace(QUERY, data={"agents": ["solver", "judge"]})
    one = ThresholdRule(file="", most=1)
    end = await play_demonstrated(Walk(), query, agents, demonstration, one)
    assert opened[0].took == [{"solver": "a", "judge": "x"}], "two depart in round 2, and one patch is left"
    assert end.rewards.by_agent == {"solver": 1 / 3, "judge": 1 / 3}
    assert len(end.rewards.turns) == 4 and end.figures["patched_turns"] == 1
    again = {"solver": Answers("solver", "axc"), "judge": Answers("judge", "xyz")}
    whole = await play_demonstrated(Walk(), query, again, demonstration, ThresholdRule(file="", most=2))
    assert opened[1].took == [{"solver": s, "judge": j} for s, j in zip("abc", "xbz", strict=True)]
    assert whole.rewards.by_agent == {"solver": 2 / 3, "judge": 2 / 3}


class ByLetter(Walk):
    def agrees(self, turn: Turn, action: str) -> bool:
        return turn.text.lower() == action


async def test_an_environment_decides_on_the_agreement(opened: list[Walk]) -> None:
    end, _ = await played("aBx", "abc", ALL, ByLetter)
    assert opened[0].took == [{"solver": "a"}, {"solver": "B"}, {"solver": "c"}], "its own words stay"
    assert end.rewards.by_agent == {"solver": 2 / 3}


@pytest.mark.parametrize(
    ("text", "agrees"),
    [
        ("go", True),
        (" go\n", True),
        ("<think>left or right?</think>\ngo", True),
        ("Go", False),
        ("go there", False),
    ],
)
def test_texts_agree_apart_from_reasoning_and_blanks(text: str, agrees: bool) -> None:
    assert Walk().agrees(Turn("solver", text, (), (1,)), "go ") is agrees


CALL = '<tool_call>\n{"name": "press", "arguments": {"x": 1, "y": 2}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "agrees"),
    [
        (f"Now.\n{CALL}", True),
        (f"<think>where?</think>Now.{CALL}", True),
        ('Now. <tool_call>{"arguments": {"y": 2, "x": 1}, "name": "press"}</tool_call>', True),
        (CALL, False),
        ("Now.", False),
        (f"Now.{CALL}{CALL}", False),
        ('Now. <tool_call>{"name": "press", "arguments": {"x": 1, "y": 3}}</tool_call>', False),
    ],
)
def test_calls_of_tools_agree_by_their_names_and_arguments(text: str, agrees: bool) -> None:
    assert Walk().agrees(Turn("solver", text, (), (1,)), f"Now.\n{CALL}") is agrees


async def test_a_turn_beyond_the_recorded_ones_is_refused_with_the_line(opened: list[Walk]) -> None:
    with pytest.raises(
        InvalidEnvironment,
        match=r"Walk asks for turn 3 of agent 'solver', and the demonstration of the query has 2 actions of it "
        r"\(walks.jsonl, line 3\)",
    ):
        await played("abc", "ab", ALL)
    assert opened[0].ends == 1
    with pytest.raises(InvalidEnvironment, match="asks for turn 1 of agent 'solver', and .* has 0 actions"):
        solver = Answers("solver", "abc")
        await play_demonstrated(Walk(), QUERY, {"solver": solver}, Demonstration({"judge": ("a",)}, ""), ALL)


class Truncated(Walk):
    async def truncated(self, limit: LimitReached) -> Rewards:
        return Rewards(solver=7.0)


async def test_a_limit_ends_it_with_the_agreement_until_then() -> None:
    end, _ = await played("ax", "abc", ALL, Truncated)
    assert end.rewards.by_agent == {"solver": 1 / 3} and end.figures["departed_trajectories"] == 0
    with pytest.raises(LimitReached):
        await played("ax", "abc", ALL)


class LeavesOut(Walk):
    async def step(self, turns: Mapping[str, Turn]) -> Any:
        outcome = await super().step(turns)
        return outcome.leave_out(self.turns["solver"][1]) if isinstance(outcome, Rewards) else outcome


async def test_turns_that_the_environment_leaves_out_stay_out() -> None:
    end, _ = await played("axc", "abc", ALL, LeavesOut)
    assert [turn.sample_id for turn in end.rewards.left_out] == ["1:q_1_solver"]


async def test_the_same_departures_are_patched_whenever_it_begins_again() -> None:
    rule = ChanceRule(file="", chance=0.5)
    ends = [await played("xyz", "abc", rule) for _ in range(3)]
    assert len({str(end.figures) for end, _ in ends}) == 1
    patches = 0
    for number in range(200):
        solver = Answers(f"s{number}", "x")
        demonstration = Demonstration({f"s{number}": ("a", "b", "c")}, "")
        query = replace(QUERY, data={"agents": [f"s{number}"]})
        try:
            end = await play_demonstrated(Walk(), query, {f"s{number}": solver}, demonstration, rule)
        except LimitReached:  # a patch: there was a second turn
            patches += 1
        else:
            assert end.figures["departed_trajectories"] == 1
    assert 75 <= patches <= 125, "200 draws of a fair chance, by the ids of their turns"


def test_a_patched_turn_of_a_chat_is_a_message_of_it() -> None:
    said = ({"role": "user", "content": "begin"}, {"role": "assistant", "content": "x"})
    turn = Turn("solver", "x", (1, 2), (9,), "id", conversation=said)
    again = {"role": "user", "content": "next"}
    written = as_written([patch_turn(turn, "go"), again])
    assert written == [said[0], {"role": "assistant", "content": "go"}, again]
    prefix, chat = segments_and_chat(prompt_parts(written), NO_OPTIONS)
    assert prefix == () and chat is not None and chat.messages == tuple(written)
    assert turn.conversation == said and turn.tokens == (9,), "the turn itself is as it was drawn"
    assert as_written([turn, again]) == [turn, again]


def test_a_patched_turn_of_text_is_text_behind_its_prompt() -> None:
    turn = Turn("solver", "x", (1, 2), (9,), "id", logprobs=(-1.0,))
    replaced = patch_turn(turn, "go")
    assert (replaced.text, replaced.tokens, replaced.logprobs, replaced.sample_id) == ("go", (), (), "id")
    written = as_written(["rules", replaced, "next"])
    assert segments_and_chat(prompt_parts(written), NO_OPTIONS) == (("rules", (1, 2), "go", "next"), None)


def test_a_function_cant_follow() -> None:
    assert "the workflow is a function, whose turns can't be replaced" in str(follow_problem(None))
    assert follow_problem(Walk) is None
