"""Answers of vLLM that are held to a form, beside others that are not."""

import asyncio
import json
import math
import string
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.errors import InvalidRequest
from flexmarl.actors.inference.engines.engine import AnswerForm, Engine, EngineRequest
from flexmarl.actors.inference.engines.threaded_engine import ThreadedEngine
from flexmarl.actors.pretrained import outline_of
from flexmarl.transport.state import StateTransport

from ....patience import PATIENCE_S
from ...chat.chat_tokenizer import END, VOCABULARY, chat_tokenizer
from .vllm_engines import OPTIONS, Learner, far_apart, model_of, request_of

pytestmark = pytest.mark.vllm

TOKENIZER = chat_tokenizer()
YES_OR_NO = AnswerForm(json.dumps({"enum": ["yes", "no"]}))
CALL = AnswerForm(
    json.dumps({"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}),
    '<tool_call>\n{"name": "set", "arguments": ',
    "}\n</tool_call>",
)


@pytest.fixture
def learner() -> Learner:
    return Learner(model_of(vocab_size=VOCABULARY))


@pytest.fixture
async def engine(learner: Learner, private: Path) -> AsyncIterator[Engine]:
    from flexmarl.actors.inference.engines.vllm_engine import VllmEngine

    model = outline_of(model_of(vocab_size=VOCABULARY))
    engine: Engine = await ThreadedEngine.open(lambda: VllmEngine(model, [END], OPTIONS, tokenizer=TOKENIZER))
    try:
        async with StateTransport(private) as transport:
            await engine.load(await transport.set("solver", learner.weights(), version=1), transport)
            yield engine
    finally:
        await engine.close()


def asked(name: str, *forms: AnswerForm, seed: int = 0, temperature: float = 1.0) -> EngineRequest:
    return replace(request_of(name, seed=seed, temperature=temperature, new=100), forms=forms)


def token(character: str) -> int:
    return int(TOKENIZER.convert_tokens_to_ids(character))


async def test_an_answer_has_its_form_and_the_log_probabilities_of_what_the_form_leaves(
    engine: Engine, learner: Learner
) -> None:
    free = replace(request_of("free"), max_new_tokens=40)

    def logprob(letter: str) -> float:
        return learner.logprobs(free.prompt_tokens, (token('"'), token(letter)))[1]

    logprobs = {letter: logprob(letter) for letter in string.ascii_lowercase}
    by_logprob = sorted(logprobs, key=lambda letter: logprobs[letter])
    either = min(pairwise(by_logprob), key=lambda pair: logprobs[pair[1]] - logprobs[pair[0]])
    mass = math.log(sum(math.exp(logprobs[letter]) for letter in either))
    form = AnswerForm(json.dumps({"enum": either}))
    requests = [asked(f"{seed}", form, seed=seed) for seed in range(24)]
    *results, of_free = await asyncio.gather(*map(engine.generate, [*requests, free]))
    assert far_apart(learner, free, of_free) < 1e-4
    drawn = set()
    for result in results:
        begin, letter, *end = result.tokens
        assert (result.finish_reason, begin, end) == ("stop", token('"'), [token('"'), END])
        drawn.add(text := TOKENIZER.decode([letter]))
        assert result.logprobs == pytest.approx((0.0, logprobs[text] - mass, 0.0, 0.0), abs=1e-4)
    assert drawn == set(either)


async def test_a_call_of_a_tool_is_one_form_among_others(engine: Engine) -> None:
    requests = [asked(f"{seed}", YES_OR_NO, CALL, seed=seed, temperature=2.0) for seed in range(24)]
    results = await asyncio.gather(*map(engine.generate, requests))
    texts = {
        "".join(TOKENIZER.decode(result.tokens[:-1]).split())
        for result in results
        if result.finish_reason == "stop"
    }
    call = '<tool_call>{"name":"set","arguments":{"x":%s}}</tool_call>'
    calls = {call % value for value in ("true", "false")}
    assert texts <= {'"yes"', '"no"', *calls}
    assert texts & calls
    assert texts - calls


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "nonsense"}, "nonsense"),
        ({"type": "integer", "multipleOf": 3}, "multipleOf"),
        ({"type": "object", "properties": 3}, "properties must be an object"),
    ],
)
async def test_a_schema_that_no_grammar_can_hold_is_refused_alone(
    engine: Engine, schema: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        await engine.generate(asked("wrong", AnswerForm(json.dumps(schema))))
    assert (await engine.generate(asked("right", YES_OR_NO))).finish_reason == "stop"


async def test_a_grammar_that_fails_under_way_fails_its_own_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory for the grammar")

    with monkeypatch.context() as patched:
        patched.setattr(XgrammarBackend, "compile_grammar", broken)
        with pytest.raises(InvalidRequest, match="given up the grammar"):
            async with asyncio.timeout(PATIENCE_S):
                await engine.generate(asked("broken", CALL))
    assert (await engine.generate(asked("right", YES_OR_NO))).finish_reason == "stop"
