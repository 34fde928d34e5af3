"""Turns with options at an instance: stop strings, messages, truncation; with the real engine and a chat tokenizer."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexmarl.actors.errors import InvalidRequest
from flexmarl.actors.inference.inference_config import EmbeddedEngineConfig, SimulatedEngineConfig
from flexmarl.actors.inference.instance import Instance
from flexmarl.actors.inference.instance_setup import InstanceSetup, ServedPolicy
from flexmarl.actors.messages import (
    Chat,
    Constraint,
    GenerateRequest,
    Generation,
    ModelConfig,
    Published,
    Truncation,
    VersionRange,
)
from flexmarl.actors.names import PolicyName, Version
from flexmarl.actors.pretrained import empty_model
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.transport.state import StateTransport

from ...patience import PATIENCE_S
from ..chat.chat_tokenizer import FORGETTING, VOCABULARY, chat_tokenizer

SOLVER = PolicyName("solver")
ZERO = VersionRange.exactly(Version(0))
ARCHITECTURE = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": VOCABULARY,
    "tie_word_embeddings": False, "max_position_embeddings": 4096, "eos_token_id": None,
}  # fmt: skip
USER = {"role": "user", "content": "1+1?"}


class Served:
    """An instance with version 0 of a policy. ``codec``: of its tokenizer."""

    def __init__(self, ref: ActorRef[Instance], publish: Any, tokenizer: Any) -> None:
        self.ref, self.publish, self.tokenizer = ref, publish, tokenizer

    async def generate(self, prompt: Any = ("say",), **options: Any) -> Generation:
        request = GenerateRequest("1:q_0_0", SOLVER, prompt, ZERO, 7, 1.0, 64)
        return await self.ref.within(PATIENCE_S).generate(replace(request, **options))


@pytest.fixture
async def served(
    request: pytest.FixtureRequest, private: Path, tmp_path: Path, system: ActorSystem
) -> AsyncIterator[Served]:
    tokenizer = chat_tokenizer(*getattr(request, "param", ()))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = ModelConfig(config=ARCHITECTURE, tokenizer=str(tmp_path / "tokenizer"))
    shapes = {name: tensor.shape for name, tensor in empty_model(model).state_dict().items()}
    async with StateTransport(private) as transport:

        async def publish(version: int) -> Published:
            generator = torch.Generator().manual_seed(0)
            weights = {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}
            handle = await transport.set("solver", weights, version=version)
            return Published(SOLVER, Version(version), handle)

        actor = Instance(
            InstanceSetup(SOLVER, {SOLVER: ServedPolicy(model, EmbeddedEngineConfig(max_batch=4))})
        )
        ref = await system.add(actor, "solver-0")
        await ref.within(PATIENCE_S).load(await publish(0))
        yield Served(ref, publish, tokenizer)


async def test_a_stop_string_ends_the_turn_with_the_token_that_completes_it(served: Served) -> None:
    whole = await served.generate()
    assert len(whole.tokens) == 64 and whole.finish_reason in ("length", "stop")
    stop = whole.text[20:23]
    at = whole.text.index(stop) + len(stop)
    ended = await served.generate(stop=("never seen", stop))
    assert ended.finish_reason == "stop" and ended.text == whole.text[:at]
    assert ended.tokens == whole.tokens[: len(ended.tokens)] and len(ended.tokens) < 64
    assert ended.logprobs == pytest.approx(whole.logprobs[: len(ended.tokens)], abs=1e-5)


async def test_a_stop_string_may_begin_before_new_weights(served: Served) -> None:
    whole = await served.generate()
    text = whole.text
    start = next(at for at in range(10, 50) if text.index(text[at : at + 3]) == at)
    texts = [served.tokenizer.decode(whole.tokens[:n], skip_special_tokens=True) for n in range(64)]
    completion = whole.tokens[: next(n for n, part in enumerate(texts) if len(part) == start + 1)]
    rest = await served.generate(
        (whole.prompt_tokens,), completion=completion, stop=(text[start : start + 3],)
    )
    assert (rest.text, rest.finish_reason) == (text[: start + 3], "stop")
    assert completion + rest.tokens == whole.tokens[: len(completion + rest.tokens)]


async def test_a_stop_string_that_is_longer_than_the_turn_is_refused(served: Served) -> None:
    with pytest.raises(
        InvalidRequest, match=r"request 1:q_0_0: the stop string 'abcde' has 5 tokens, max_new_tokens is 4"
    ):
        await served.generate(stop=("abcde",), max_new_tokens=4)
    assert len((await served.generate(stop=("abcd",), max_new_tokens=4)).tokens) == 4


async def test_a_conversation_keeps_the_tokens_of_its_turns(served: Served) -> None:
    first = await served.generate((), chat=Chat((USER,)))
    text = served.tokenizer.decode(first.prompt_tokens, skip_special_tokens=False)
    assert text == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    known = first.prompt_tokens + first.tokens
    messages = (USER, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Sure?"})
    turn = (first.prompt_tokens, first.tokens)
    second = await served.generate(turn, chat=Chat(messages, answered=2))
    assert second.prompt_tokens[: len(known)] == known
    assert "Sure?" in served.tokenizer.decode(second.prompt_tokens[len(known) :])


@pytest.mark.parametrize("served", [(FORGETTING,)], indirect=True)
async def test_a_template_that_rewrites_turns_is_refused_for_this_turn_alone(served: Served) -> None:
    messages = (USER, {"role": "assistant", "content": "<think>a</think>2"}, USER)
    answer = tuple(served.tokenizer.encode("<think>a</think>2"))
    with pytest.raises(InvalidRequest, match="rewrites earlier turns"):
        await served.generate(((1, 2), answer), chat=Chat(messages, answered=2))
    again = await served.generate((), chat=Chat(messages))
    assert "think" not in served.tokenizer.decode(again.prompt_tokens)


async def test_a_truncation_reaches_the_engine(served: Served) -> None:
    greedy = await served.generate(temperature=0.0)
    one = await served.generate(truncation=Truncation(top_k=1))
    assert one.tokens == greedy.tokens and set(one.logprobs) == {0.0}


async def test_the_simulated_engine_takes_the_same_turns(system: ActorSystem, private: Path) -> None:
    config = SimulatedEngineConfig(median_tokens=1e9, sigma=0.0, token_s=1e-5)
    ref = await system.add(Instance(InstanceSetup(SOLVER, {SOLVER: ServedPolicy(None, config)})), "solver-0")
    async with StateTransport(private) as transport:
        handle = await transport.set("solver", {"state": torch.tensor([0, 0])}, version=0)
        await ref.within(PATIENCE_S).load(Published(SOLVER, Version(0), handle))
        served = Served(ref, None, None)
        first = await served.generate((), chat=Chat((USER,)))
        assert bytes(first.prompt_tokens).decode() == "user: 1+1?\nassistant: "
        known = first.prompt_tokens + first.tokens
        answer = {"role": "assistant", "content": first.text}
        second, ended = await asyncio.gather(
            served.generate((first.prompt_tokens, first.tokens), chat=Chat((USER, answer, USER), answered=2)),
            served.generate(stop=(first.text[10:12],), sample_id="1:q_1_0", prompt=("say",)),
        )
        assert second.prompt_tokens[: len(known)] == known
        assert bytes(second.prompt_tokens[len(known) :]).decode() == "\nuser: 1+1?\nassistant: "
        assert ended.finish_reason == "stop" and ended.text.endswith(first.text[10:12])


async def test_the_embedded_engine_refuses_a_form_by_its_name(served: Served) -> None:
    with pytest.raises(InvalidRequest, match="the engine embedded can't hold an answer to JSON"):
        await served.generate(constraint=Constraint('{"type": "object"}'))
