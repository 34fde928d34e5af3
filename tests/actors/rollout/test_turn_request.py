"""A turn's options reach the instance and the store; an invalid one fails its trajectory alone, by name."""

import pytest

from flexmarl.actors.messages import Chat, Constraint, GenerateRequest, Query, Truncation
from flexmarl.actors.orchestrator.evaluation import EvaluationRules
from flexmarl.actors.orchestrator.orchestrator_config import EvaluationConfig
from flexmarl.actors.rollout.rollout_config import SamplingConfig

from .fake_cluster import QUERY, FakeCluster, evaluate, serve, start_step


async def asked(
    cluster: FakeCluster, body: str, trajectories: int = 1
) -> tuple[list[GenerateRequest], list[str]]:
    """The requests of a step, and the errors of its trajectories."""
    rollout = await cluster.open(body)
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [Query("q7", "2+2")], trajectories, {"solver": 0, "judge": 0})
    group = await cluster.closed()
    requests = [request for fake in cluster.instances["solver"] for request in fake.asked]
    requests.sort(key=lambda request: request.sample_id)
    return requests, [failure.error for failure in group.failures]


async def test_options_travel_with_the_turn_and_its_sample(cluster: FakeCluster) -> None:
    cluster.sampling["solver"] = SamplingConfig(top_k=9, max_new_tokens=20)
    body = """
    solver = agents["solver"]
    await solver.generate("a")
    await solver.generate(
        "b", stop="x", max_new_tokens=7, temperature=0.3, top_p=0.5, top_k=4, min_p=0.25, seed=11
    )
    return Rewards(solver=1.0)
"""
    (plain, changed), errors = await asked(cluster, body)
    assert errors == []
    assert (plain.temperature, plain.max_new_tokens, plain.truncation) == (1.0, 20, Truncation(top_k=9))
    assert plain.stop == () and plain.chat is None
    assert (changed.temperature, changed.max_new_tokens, changed.seed) == (0.3, 7, 11)
    assert changed.truncation == Truncation(4, 0.5, 0.25) and changed.stop == ("x",)
    first, second = await cluster.rows("solver", 0, 2)
    assert (first.temperature, first.truncation) == (1.0, Truncation(top_k=9))
    assert (second.temperature, second.truncation) == (0.3, Truncation(4, 0.5, 0.25))


async def test_a_turn_with_a_form_is_asked_for_and_not_trained(cluster: FakeCluster) -> None:
    body = """
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    user, solver = {"role": "user", "content": "1+1?"}, agents["solver"]
    await solver.generate("a")
    await solver.generate("a", schema={"enum": [1]})
    await solver.generate([user], tools=[tool], schema={"enum": [1]})
    await solver.generate([user], tools=[tool], must_call=True)
    await solver.generate([user], tools=[tool], must_call="add", schema={"enum": [1]})
    return Rewards(solver=1.0)
"""
    (plain, *constrained), errors = await asked(cluster, body)
    assert errors == [] and plain.constraint is None
    assert [request.constraint for request in constrained] == [
        Constraint('{"enum": [1]}'),
        Constraint('{"enum": [1]}', ("add",)),
        Constraint(tools=("add",)),
        Constraint(tools=("add",)),
    ]
    (row,) = await cluster.rows("solver", 0, 1)
    assert row.sample_id == plain.sample_id


async def test_a_turn_tells_how_it_was_generated(cluster: FakeCluster) -> None:
    body = """
    turn = await agents["solver"].generate([{"role": "user", "content": "1+1?"}], stop="x")
    assert turn.logprobs == (-0.5,) * len(turn.tokens), turn
    assert (turn.finish_reason, turn.version, turn.tool_calls) == ("stop", 0, ())
    more = await agents["solver"].generate([turn, {"role": "user", "content": "Sure?"}])
    roles = [message["role"] for message in more.conversation]
    assert roles == ["user", "assistant", "user", "assistant"], roles
    assert more.conversation[1]["content"] == turn.text
    return Rewards(solver=1.0)
"""
    (first, second), errors = await asked(cluster, body)
    assert errors == []
    user = {"role": "user", "content": "1+1?"}
    assert first.prompt == () and first.chat == Chat((user,))
    assert second.chat is not None and second.chat.answered == 2
    before, answer = second.prompt
    assert before == () and set(answer) == {65}, "the first answer, whose prompt has no tokens here"


BAD = {
    "temperature=-1": "temperature is -1, needs at least 0",
    "stop=''": "stop has '', needs strings that are not empty",
    "top_p=2.0": "top_p is 2.0, needs more than 0 and at most 1",
    "schema=3": "schema is int, needs a JSON schema",
    "schema={'enum': [{1}]}": "schema is not JSON: Object of type set",
    "must_call=True": "must_call needs tools",
    "must_call='add'": "must_call is 'add', the tools are: none",
    "temprature=1": "generate has no argument 'temprature'",
}


@pytest.mark.parametrize("option", BAD)
async def test_an_invalid_option_fails_its_trajectory_alone(cluster: FakeCluster, option: str) -> None:
    body = f"""
    begun = query.data.setdefault("begun", [])
    begun.append(1)
    if len(begun) == 2:
        await agents["solver"].generate("b", {option})
    await agents["solver"].generate("a")
    return Rewards(solver=1.0)
"""
    requests, (error,) = await asked(cluster, body, trajectories=3)
    assert len(requests) == 2 and BAD[option] in error
    if "keyword" not in error:
        assert "agent solver: " in error and "request 1:q7_0_" in error


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("[]", "agent solver: the prompt is an empty list"),
        ('[{"content": "x"}]', "agent solver: messages[0] has no role"),
        ('[{"role": "user", "content": "x", "contents": "y"}]', "messages[0] has the unknown key 'contents'"),
        (r'"a\ud83d"', r"agent solver: prompt is 'a\ud83d': half of a surrogate pair"),
        (r'["a", "\ud83d"]', r"agent solver: prompt[1] is '\ud83d': half of a surrogate pair"),
        (
            r'[{"role": "user", "content": "\ud83d"}]',
            r"agent solver: messages[0].content is '\ud83d': half of a surrogate pair",
        ),
        (r'"a", stop="\ud83d"', r"agent solver: stop is '\ud83d': half of a surrogate pair"),
    ],
)
async def test_an_invalid_prompt_is_named(cluster: FakeCluster, prompt: str, problem: str) -> None:
    body = f'await agents["solver"].generate({prompt}); return Rewards(solver=1.0)'
    requests, (error,) = await asked(cluster, body)
    assert requests == [] and problem in error and "InvalidRequest" in error and "1:q7_0_0" in error


async def test_half_of_a_character_in_a_metric_or_an_error_fails_its_trajectory_alone(
    cluster: FakeCluster,
) -> None:
    body = r"""
    begun = query.data.setdefault("begun", [])
    begun.append(1)
    number = len(begun)
    await agents["solver"].generate("a")
    if number == 1:
        raise ValueError("\ud83d")
    return Rewards(solver=1.0, metrics={"m\ud83d" if number == 2 else "m": 1.0})
"""
    _, errors = await asked(cluster, body, trajectories=3)
    assert sorted(errors) == [
        r"InvalidReward: metric 'm\ud83d': a name is a string without halves of surrogate pairs",
        r"ValueError: \ud83d",
    ]


async def test_a_greedy_evaluation_stays_greedy(cluster: FakeCluster) -> None:
    body = 'await agents["solver"].generate("a", temperature=0.9, seed=5); return Rewards(solver=1.0)'
    rollout = await cluster.open(body)
    await serve(rollout, "solver", 0)
    await evaluate(rollout, [QUERY], {"solver": 0}, EvaluationRules(EvaluationConfig().all_samplings()))
    (request,) = [request for fake in cluster.instances["solver"] for request in fake.asked]
    assert (request.temperature, request.seed) == (0.0, 5)
