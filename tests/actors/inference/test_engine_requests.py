"""A turn's request as the engine gets it, and the engine's result as the turn's answer."""

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from flexmarl.actors.chat.answer import Answer, WrittenCall
from flexmarl.actors.chat.byte_codec import ByteCodec
from flexmarl.actors.chat.renderer_codec import RendererCodec
from flexmarl.actors.errors import InvalidRequest
from flexmarl.actors.inference.engine_requests import answer_forms, engine_request, generation_of, keep_result
from flexmarl.actors.inference.engines.engine import AnswerForm, EngineRequest, EngineResult
from flexmarl.actors.inference.inference_config import EmbeddedEngineConfig, VllmEngineConfig
from flexmarl.actors.messages import Chat, Constraint, GenerateRequest, Generation, VersionRange
from flexmarl.actors.names import PolicyName, Version
from flexmarl.core.protocol.codec import Encoder, unpack

from ..chat.qwen3_tokenizer import qwen3_tokenizer

PROMPT = (4, 5, 4, 7, 8)
SOLVER = PolicyName("solver")
THREE = Version(3)
ONLY_THREE = VersionRange.exactly(THREE)
CODEC = ByteCodec("bytes")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "required": ["a"]}}}
BARE_TOOL = {"type": "function", "function": {"name": "stop"}}
VLLM = VllmEngineConfig()
ASKED = GenerateRequest("1:q_0_0", SOLVER, ("2+2",), ONLY_THREE, 99, 0.7, 1000)


def test_a_completion_becomes_part_of_the_prompt() -> None:
    request = GenerateRequest("1:q_0_0", SOLVER, ("2+2",), ONLY_THREE, 99, 0.7, 1000, completion=(1, 2))
    assert engine_request(request, PROMPT) == EngineRequest("1:q_0_0", (*PROMPT, 1, 2), 99, 0.7, 998, 2)


def test_the_answer_has_the_tokens_of_the_result() -> None:
    result = EngineResult("1:q_0_0", (98,), (-0.5,), "stop")
    request = replace(ASKED, completion=(97,))
    expected = Generation("ab", PROMPT, (98,), (-0.5,), THREE, "stop")
    assert generation_of(THREE, request, PROMPT, result, CODEC) == expected
    plain = replace(request, chat=Chat(()))
    assert generation_of(THREE, plain, PROMPT, result, CODEC) == expected, "the text is all of it"


def test_an_answer_to_messages_has_its_parts() -> None:
    text = '<think>so</think>Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    tokens = tuple(text.encode())
    result = EngineResult("1:q_0_0", tokens[9:], (-0.5,) * len(tokens[9:]), "stop")
    request = replace(ASKED, completion=tokens[:9])
    assert generation_of(THREE, request, PROMPT, result, CODEC).answer is None, "a prompt of text"
    first, second = (
        generation_of(THREE, replace(request, chat=Chat(()), sample_id=name), PROMPT, result, CODEC).answer
        for name in ("1:q_0_0", "1:q_0_1")
    )
    assert first is not None and second is not None
    assert (first.content, first.reasoning) == ("Let me see.", "so")
    (call,), (other,) = first.calls, second.calls
    assert call == replace(other, id=call.id) == WrittenCall("add", '{"a": 1}', id=call.id)
    assert call.id != other.id and len(call.id) == 9 and call.id.isalnum()
    whole = Generation("x", PROMPT, (98,), (-0.5,), THREE, "stop", first)
    assert TypeAdapter(Generation).validate_python(unpack(Encoder().pack(whole))) == whole
    cut = replace(result, finish_reason="interrupted")
    assert generation_of(THREE, replace(request, chat=Chat(())), PROMPT, cut, CODEC).answer is None


def test_an_interrupted_turn_is_answered_with_its_tokens() -> None:
    result = EngineResult("1:q_0_0", (97,), (-0.5,), "interrupted")
    answer = generation_of(THREE, ASKED, PROMPT, result, CODEC)
    assert (answer.tokens, answer.finish_reason, answer.policy_version) == ((97,), "interrupted", 3)


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


def test_the_forms_of_an_answer_are_json_or_a_call_as_the_model_writes_it() -> None:
    chat = Chat(({"role": "user", "content": "1+1?"},), (TOOL, BARE_TOOL))
    constraint = Constraint('{"enum": [2]}', ("add", "stop"))
    request = replace(ASKED, chat=chat, constraint=constraint)
    unpacked = TypeAdapter(GenerateRequest).validate_python(unpack(Encoder().pack(request)))
    assert unpacked.constraint == constraint
    of_json, add, stop = forms = answer_forms(request, PROMPT, CODEC, VLLM)
    assert of_json == AnswerForm('{"enum": [2]}')
    assert add.begin == '<tool_call>\n{"name": "add", "arguments": ' and add.end == "}\n</tool_call>"
    assert [json.loads(form.schema) for form in (add, stop)] == [
        {"type": "object", "required": ["a"]},
        {"type": "object"},
    ]
    assert engine_request(request, PROMPT, forms).forms == forms
    assert answer_forms(ASKED, PROMPT, CODEC, EmbeddedEngineConfig()) == ()


def test_a_form_that_can_not_be_held_is_refused_with_the_reason() -> None:
    asked_json = replace(ASKED, constraint=Constraint('{"type": "object"}'))
    with pytest.raises(InvalidRequest, match="the engine embedded can't hold an answer to JSON"):
        answer_forms(asked_json, PROMPT, CODEC, EmbeddedEngineConfig())
    with pytest.raises(InvalidRequest, match="would be a part of the reasoning"):
        answer_forms(asked_json, CODEC.encode("1+1? <think>\n", True), CODEC, VLLM)

    class OtherCalls(ByteCodec):
        def parse(self, *_: Any) -> Answer:
            return Answer("no call")

    chat = Chat(({"role": "user", "content": "1+1?"},), (TOOL,))
    asked_call = replace(ASKED, chat=chat, constraint=Constraint(tools=("add",)))
    with pytest.raises(
        InvalidRequest, match="a call of add can't be forced: the model does not write calls as"
    ):
        answer_forms(asked_call, PROMPT, OtherCalls("bytes"), VLLM)


def test_a_call_can_be_forced_in_the_form_of_a_family_that_writes_it_so() -> None:
    chat = Chat(({"role": "user", "content": "1+1?"},), (TOOL,))
    codec = RendererCodec(qwen3_tokenizer(), "auto")
    asked_call = replace(ASKED, chat=chat, constraint=Constraint(tools=("add",)))
    prompt = codec.chat_tokens(chat, (), ())
    assert prompt is not None
    (form,) = answer_forms(asked_call, prompt, codec, VLLM)
    assert form.begin.startswith("<tool_call>")
