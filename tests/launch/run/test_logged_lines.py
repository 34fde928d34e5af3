"""The lines of a log: what they become, and what is refused, with the number of the line."""

import math
from typing import Any

import pytest

from flexmarl.actors.errors import QueriesRefused
from flexmarl.actors.inference.engine_requests import prompt_tokens
from flexmarl.actors.messages import Chat, GenerateRequest, LoggedGroup, VersionRange
from flexmarl.actors.names import PolicyName, Version
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.run.logged_lines import LogReader

from ..conftest import SIMULATED, TINY

ALONE = ("agents.solver.algorithm.name=reinforce_pp",)


def config(*settings: str, simulated: bool = True) -> RunConfig:
    return resolve(str(TINY), [*(SIMULATED if simulated else ()), *settings])


def line(**keys: Any) -> dict[str, Any]:
    logged: dict[str, Any] = {
        "query": "q", "agent": "solver", "prompt": "12=", "answer": "ab", "reward": 1.0, "logprobs": [-0.5, -1.0],
    }  # fmt: skip
    return {key: value for key, value in (logged | keys).items() if value is not None}


def logged_groups(of: RunConfig, lines: list[Any]) -> list[LoggedGroup]:
    return LogReader(of).groups(lines)


def refusal(of: RunConfig, *lines: Any) -> str:
    with pytest.raises(QueriesRefused) as refused:
        logged_groups(of, [*lines])
    return str(refused.value)


def test_answers_to_a_query_are_a_group_in_the_order_of_their_lines() -> None:
    lines = [line(), line(query="other", reward=0.0), line(reward=0.5), line(query="other")]
    first, second = logged_groups(config(), lines)
    assert (first.query.id, first.query.text, second.query.id) == ("q", "12=", "other")
    assert [trajectory.rewards for trajectory in first.trajectories] == [{"solver": 1.0}, {"solver": 0.5}]
    (turn,) = first.trajectories[0].turns
    assert (turn.prompt_tokens, turn.tokens, turn.text) == (tuple(b"12="), tuple(b"ab"), "ab")
    assert (turn.logprobs, turn.temperature, turn.version) == ((-0.5, -1.0), 1.0, None)


def test_the_end_of_an_answer_has_a_log_prob_of_its_own_or_is_not_there() -> None:
    (group,) = logged_groups(config(*ALONE), [line(logprobs=[-0.5, -1.0, -0.1])])
    assert group.turns[0].tokens == (*b"ab", 0)
    (group,) = logged_groups(config(*ALONE, "mode=async"), [line(version=3, logprobs=None)])
    assert group.turns[0].tokens == (*b"ab", 0) and all(map(math.isnan, group.turns[0].logprobs))
    assert group.turns[0].version == 3 and group.oldest() == {"solver": 3}


def test_ids_take_the_place_of_texts() -> None:
    ids = line(prompt=None, prompt_tokens=[49, 61], answer=None, tokens=[97, 98])
    (group,) = logged_groups(config(*ALONE), [ids])
    (turn,) = group.turns
    assert (turn.prompt_tokens, turn.tokens, turn.text, turn.prompt) == ((49, 61), (97, 98), "ab", [])


def test_several_turns_and_agents_are_one_trajectory() -> None:
    turns = [{key: line()[key] for key in ("agent", "prompt", "answer", "logprobs")} for _ in range(3)]
    turns[1]["agent"] = "checker"
    two = config("agents={solver: {}, checker: {}}", "data.shape=pair")
    lines = [{"query": "q", "reward": {"solver": float(n), "checker": 0.5}, "turns": turns} for n in range(2)]
    (group,) = logged_groups(two, lines)
    assert [turn.agent for turn in group.trajectories[1].turns] == ["solver", "checker", "solver"]
    assert group.trajectories[1].rewards == {"solver": 1.0, "checker": 0.5}


def test_a_line_without_a_query_has_its_name_by_its_contents() -> None:
    first, second = logged_groups(config(*ALONE), [line(query=None), line(query=None, reward=0.5)])
    (again,) = logged_groups(config(*ALONE), [line(query=None, reward=0.5)])
    assert first.query.id != second.query.id == again.query.id and first.query.id.startswith("log-")


def test_a_prompt_of_messages_has_the_tokens_of_a_rollouts_prompt() -> None:
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "12="}]
    (group,) = logged_groups(config(*ALONE), [line(prompt=messages)])
    request = GenerateRequest(
        "1:q_0_0", PolicyName("solver"), (), VersionRange.exactly(Version(0)), 0, 1.0, 3,
        chat=Chat(tuple(messages)),
    )  # fmt: skip
    codec = LogReader(config())._text_of(PolicyName("solver")).codec
    assert group.turns[0].prompt_tokens == prompt_tokens(request, codec)
    assert group.query.text == "12="


def test_texts_become_the_tokens_of_the_models_tokenizer() -> None:
    """The tiny model has 14 tokens, and a context of 64."""
    real = config("agents.solver.algorithm.name=reinforce_pp", simulated=False)
    (group,) = logged_groups(real, [line(answer="7") | {"logprobs": [-0.5, -0.25]}])
    assert len(group.turns[0].tokens) == 2 and max(group.turns[0].tokens) < 14
    assert "tokens has 14, needs ids of 0 to 13" in refusal(real, line(tokens=[14], logprobs=[-1.0]))
    long = line(prompt="1" * 64, answer="7", logprobs=[-0.5])
    assert "prompt and answer have 65 tokens, the model's context has 64" in refusal(real, long)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"agent": "solvr"}, "agent is 'solvr', the run trains solver; do you mean solver?"),
        ({"agent": 3}, "agent is 3, the run trains solver"),
        ({"promt": "x"}, "the unknown key 'promt'; known are: query, reward, turns, agent, prompt"),
        ({"query": ""}, "query is '', needs a name"),
        ({"prompt": None}, "prompt is missing: text, a list of messages, or `prompt_tokens`"),
        ({"prompt": {"role": "user"}}, "the prompt is one message, needs a list of messages"),
        ({"prompt": [{"role": "user", "content": 3}]}, "has the content 3, needs a string"),
        ({"answer": None}, "answer is missing: text, or `tokens`"),
        ({"answer": 3}, "answer is 3, needs a text"),
        ({"answer": "", "logprobs": []}, "answer has no token"),
        ({"logprobs": None}, "an answer of another policy needs its `logprobs`"),
        ({"logprobs": [-1.0]}, "logprobs has 1 numbers, and the answer has 2 tokens by this run's tokenizer"),
        ({"logprobs": [-1.0, 0.5]}, "logprobs needs a list of finite numbers, 0 at most"),
        ({"logprobs": [-1.0, math.nan]}, "logprobs needs a list of finite numbers, 0 at most"),
        ({"tokens": [-1]}, "tokens has -1, needs ids of 0 to 255"),
        ({"prompt_tokens": "12"}, "prompt_tokens is '12', needs a list of token ids"),
        ({"reward": None}, "reward of solver is None, needs a finite number"),
        ({"reward": math.inf}, "reward of solver is inf, needs a finite number"),
        ({"reward": 1e13}, "reward of solver is 10000000000000.0, needs a finite number, at most 1e+12"),
        ({"reward": {"checker": 1.0}}, "reward has checker, needs solver"),
        ({"temperature": 0}, "temperature is 0, needs that of the log-probs, above 0"),
        ({"version": 3}, "version is for mode=async, whose max_staleness bounds the age of an answer"),
        ({"answer": "\ud83d"}, "answer is '\\ud83d': half of a surrogate pair"),
        ({"turns": []}, "the unknown key 'agent'; known are: query, reward, turns"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_with_the_number_of_their_line(keys: dict[str, Any], words: str) -> None:
    text = refusal(config(), line(), line(**keys), line())
    assert text.startswith("1 of 3 lines can't be trained\n  line 2: ") and words in text


@pytest.mark.parametrize(
    ("settings", "keys", "words"),
    [
        (("mode=async",), {"version": -1}, "version is -1, needs that of the policy, 0 or more"),
        (
            ("agents.solver.algorithm.correction=none",),
            {},
            "policies.solver.algorithm.correction=none corrects for no other policy",
        ),
        (
            ("mode=async", "agents.solver.algorithm.old_policy=behaviour"),
            {"version": 1, "logprobs": None},
            "policies.solver.algorithm.old_policy=behaviour compares with the log-probs of the answer",
        ),
        (
            ("agents.solver.columns.note={type: str, required: true}",),
            {},
            "agents.solver.columns.note is required of the workflow, and a log has no columns: set required=false",
        ),
    ],
)
def test_answers_that_the_runs_settings_can_not_train_are_refused_by_name(
    settings: tuple[str, ...], keys: dict[str, Any], words: str
) -> None:
    assert words in refusal(config(*settings), line(**keys), line(**keys))


def test_an_answer_without_siblings_is_refused_where_rewards_are_compared() -> None:
    text = refusal(config(), line(), line(), line(query="alone"), line(query=None))
    assert "line 3: grpo compares the rewards of a query's answers, and agent solver has one answer" in text
    assert "line 4: " in text and text.startswith("2 of 4 lines")
    assert len(logged_groups(config(*ALONE), [line(query="alone")])) == 1


def test_turns_with_rewards_of_their_own_are_lines_of_their_own() -> None:
    of_turns = config("agents.solver.algorithm={name: at_grpo, rewards: turn}")
    turn = {key: value for key, value in line().items() if key not in ("query", "reward")}
    two = {"query": "q", "reward": 1.0, "turns": [turn, turn]}
    assert "line 1: agent solver has several turns, each of which has a reward of its own" in refusal(
        of_turns, two
    )


def test_what_is_no_object_is_refused() -> None:
    assert "line 1: it is list, needs an object with agent, prompt, answer" in refusal(config(), [])


def test_a_frozen_agents_turns_are_refused() -> None:
    frozen = config(
        "agents={solver: {}, checker: {policy: other}}", "policies.other.train=false", "data.shape=pair"
    )
    assert "line 1: agent checker is not trained: leave its turns out" in refusal(
        frozen, line(agent="checker")
    )
