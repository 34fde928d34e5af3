"""A turn in pieces: what comes of it, whichever versions generated how much of it."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.chat.answer import Answer
from flexmarl.actors.inference.engine_requests import engine_request
from flexmarl.actors.messages import Chat, GenerateRequest, Generation, Sample, VersionRange
from flexmarl.actors.names import AgentName, PolicyName, Version
from flexmarl.actors.rollout.resumable_turn import ResumableTurn

SOLVER = PolicyName("solver")
THREE = VersionRange.exactly(Version(3))
REQUEST = GenerateRequest("1:q_0_0", SOLVER, ("2+2", (7, 8)), VersionRange(Version(3), None), 99, 0.7, 1000)
PROMPT = (4, 5, 4, 7, 8)


def sample_of(turn: ResumableTurn) -> Sample:
    return Sample(
        "1:q_0_0", "solver", 1, turn.policy_version, "1:q", 1.0, 0.0,
        turn.prompt_tokens, turn.tokens, turn.logprobs, version_changes=turn.version_changes,
    )  # fmt: skip


@given(pieces=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), max_size=6), last=st.integers(1, 4))
def test_every_token_keeps_its_version_and_its_log_probability(
    pieces: list[tuple[int, int]], last: int
) -> None:
    """``pieces``: tokens of each and by how many versions the next is later."""
    turn = ResumableTurn(REQUEST)
    expected: list[tuple[int, int, float]] = []  # token, version, log-probability
    version = Version(3)
    for number, (count, later) in enumerate([*pieces, (last, 0)]):
        assert turn.request.versions.oldest <= version and not turn.ended
        assert turn.request.completion == tuple(token for token, _, _ in expected)
        request = engine_request(turn.request, PROMPT)
        assert request.prompt_tokens == PROMPT + turn.tokens
        assert (request.resumed_tokens, request.max_new_tokens) == (len(expected), 1000 - len(expected))
        drawn = [(100 + len(expected) + n, version, -0.25 * (len(expected) + n)) for n in range(count)]
        expected += drawn
        tokens, logprobs = tuple(t for t, _, _ in drawn), tuple(p for _, _, p in drawn)
        reason = "stop" if number == len(pieces) else "interrupted"
        turn.take(Generation(f"piece {number}", PROMPT, tokens, logprobs, version, reason))  # type: ignore[arg-type]
        version = Version(version + later)
    assert turn.ended and turn.text == f"piece {len(pieces)}" and turn.prompt_tokens == PROMPT
    sample = sample_of(turn)
    found = zip(sample.tokens, sample.token_versions, sample.logprobs, strict=True)
    assert list(found) == expected
    assert sample.policy_version == min(sample.token_versions) == sample.token_versions[0]
    assert len(sample.version_changes) == 2 * (len(set(sample.token_versions)) - 1)


def test_what_goes_on_asks_for_the_very_tokens_of_its_version_or_a_later_one() -> None:
    turn = ResumableTurn(REQUEST)
    turn.take(Generation("ab", PROMPT, (1, 2), (-0.5, -1.0), Version(4), "interrupted"))
    assert turn.request == GenerateRequest(
        "1:q_0_0", SOLVER, (PROMPT,), VersionRange(Version(4), None), 99, 0.7, 1000, completion=(1, 2)
    )
    turn.ask_for(Version(7))
    assert turn.request.versions == VersionRange(Version(7), None)


def test_the_rest_of_an_answer_to_messages_is_read_with_the_tools_of_its_beginning() -> None:
    chat = Chat(({"role": "user", "content": "1 + 1?"},), ({"type": "function"},))
    request = replace(REQUEST, prompt=(), chat=chat)
    turn = ResumableTurn(request)
    turn.take(Generation("", PROMPT, (), (), Version(3), "interrupted"))
    assert turn.request == request, "without a token all of it begins again"
    turn.take(Generation("a", PROMPT, (1,), (-0.5,), Version(3), "interrupted"))
    assert (turn.request.prompt, turn.request.chat) == ((PROMPT,), replace(chat, messages=()))
    answer = Answer("b", "a")
    turn.take(Generation("ab", PROMPT, (2,), (-0.5,), Version(3), "stop", answer))
    result = turn.result(AgentName("solver"), chat, lambda columns: None)
    assert (result.answer, result.reasoning, result.tools) == (answer, "a", chat.tools)


def test_a_turn_is_truncated_if_its_last_part_reached_the_limit() -> None:
    turn = ResumableTurn(REQUEST)
    for reason, truncated in (("interrupted", False), ("length", True)):
        turn.take(Generation("x", PROMPT, (9,), (-0.5,), Version(3), reason))  # type: ignore[arg-type]
        assert turn.truncated is truncated
