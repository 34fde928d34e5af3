"""A turn's request as the engine gets it, and the engine's result as the turn's answer."""

import pytest

from flexmarl.actors.errors import InvalidRequest
from flexmarl.actors.inference.engine_requests import engine_request, generation_of, keep_result
from flexmarl.actors.inference.engines.engine import EngineRequest, EngineResult
from flexmarl.actors.messages import GenerateRequest, Generation, VersionRange
from flexmarl.actors.names import PolicyName, Version

PROMPT = (4, 5, 4, 7, 8)
SOLVER = PolicyName("solver")
THREE = Version(3)
ONLY_THREE = VersionRange.exactly(THREE)


def test_a_completion_becomes_part_of_the_prompt() -> None:
    request = GenerateRequest("1:q_0_0", SOLVER, ("2+2",), ONLY_THREE, 99, 0.7, 1000, completion=(1, 2))
    assert engine_request(request, PROMPT) == EngineRequest("1:q_0_0", (*PROMPT, 1, 2), 99, 0.7, 998, 2)


def test_the_answer_has_the_tokens_of_the_result() -> None:
    result = EngineResult("1:q_0_0", (1, 2), (-0.5, -1.0), "stop")
    assert generation_of(THREE, PROMPT, result, "ab") == Generation(
        "ab", PROMPT, (1, 2), (-0.5, -1.0), THREE, "stop"
    )


def test_an_interrupted_turn_is_answered_with_its_tokens() -> None:
    result = EngineResult("1:q_0_0", (1,), (-0.5,), "interrupted")
    answer = generation_of(THREE, PROMPT, result, "a")
    assert (answer.tokens, answer.finish_reason, answer.policy_version) == ((1,), "interrupted", 3)


def test_a_complete_turn_can_not_be_resumed() -> None:
    with pytest.raises(InvalidRequest, match="max_new_tokens is 0"):
        engine_request(
            GenerateRequest("q", SOLVER, (PROMPT,), ONLY_THREE, 99, 0.7, 2, completion=(1, 2)), PROMPT
        )


def test_an_engine_that_can_not_resume_keeps_nothing_of_an_interrupted_turn() -> None:
    part = EngineResult("q", (1, 2), (-0.5, -1.0), "interrupted")
    whole = EngineResult("q", (1, 2), (-0.5, -1.0), "stop")
    assert keep_result(part, resumable=True) == part
    assert keep_result(part, resumable=False) == EngineResult("q", (), (), "interrupted")
    assert keep_result(whole, resumable=False) == whole
