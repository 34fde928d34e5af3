"""An instance with the real engine: versions, dropped turns, refusals."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flexmarl.actors.errors import InvalidRequest, PromptTooLong, WrongVersion
from flexmarl.actors.inference.inference_config import EmbeddedEngineConfig
from flexmarl.actors.inference.instance import Instance
from flexmarl.actors.inference.instance_setup import InstanceSetup, ServedPolicy
from flexmarl.actors.messages import GenerateRequest, ModelConfig, Published, TextApi, TextTo, VersionRange
from flexmarl.actors.names import PolicyName, Version
from flexmarl.actors.pretrained import empty_model
from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.errors import CallTimeout
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.transport.state import StateTransport

from ...patience import PATIENCE_S

ARCHITECTURE = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 12,
    "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip

SOLVER = PolicyName("solver")
FROM_0, FROM_1 = (VersionRange(Version(oldest), None) for oldest in (0, 1))


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    """Ten digits as vocabulary; neither of the two special tokens ends a turn, so turns are as long as asked."""
    vocabulary = {c: n for n, c in enumerate("0123456789")} | {"<pad>": 10, "<eos>": 11}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast: Any = PreTrainedTokenizerFast  # untyped
    fast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(tmp_path / "tokenizer")
    return ModelConfig(config=ARCHITECTURE, tokenizer=str(tmp_path / "tokenizer"))


class Source:
    """Publishes weights as a trainer would."""

    def __init__(self, model: ModelConfig, transport: StateTransport) -> None:
        self._model = empty_model(model)
        self._weights = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        self._transport = transport

    def _draw(self, version: int) -> None:
        generator = torch.Generator().manual_seed(version)
        for tensor in self._weights.values():
            tensor.normal_(0.0, 0.5, generator=generator)

    def logprobs(self, version: int, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[float]:
        """Log-probabilities of ``tokens`` behind ``prompt``, by the weights of ``version``."""
        self._draw(version)
        self._model.load_state_dict(self._weights)
        output: Any = self._model(torch.tensor([prompt + tokens]))
        every = output.logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        found: list[float] = every.gather(1, torch.tensor(tokens)[:, None]).squeeze(1).tolist()
        return found

    async def publish(self, version: int) -> Published:
        self._draw(version)
        return Published(
            SOLVER, Version(version), await self._transport.set("solver", self._weights, version=version)
        )


@pytest.fixture
async def source(model: ModelConfig, private: Path) -> AsyncIterator[Source]:
    async with StateTransport(private) as transport:
        yield Source(model, transport)


@pytest.fixture
async def instance(model: ModelConfig, private: Path, system: ActorSystem) -> ActorRef[Instance]:
    actor = Instance(InstanceSetup(SOLVER, {SOLVER: ServedPolicy(model, EmbeddedEngineConfig(max_batch=4))}))
    return await system.add(actor, "solver-0")


def turn(version: int, number: int = 0, length: int = 5, prompt: str = "31") -> GenerateRequest:
    versions = VersionRange.exactly(Version(version))
    return GenerateRequest(f"q{number}_0_0", SOLVER, (prompt, (4, 1)), versions, number, 1.0, length)


async def test_each_version_answers_by_its_own_weights(instance: ActorRef[Instance], source: Source) -> None:
    answers = []
    for version in (0, 1):
        assert (await instance.api.load(await source.publish(version))).version == version
        answers.append(await instance.api.generate(turn(version)))
    assert [a.policy_version for a in answers] == [0, 1]
    assert answers[0].tokens != answers[1].tokens
    assert answers[0].prompt_tokens == (3, 1, 4, 1)
    assert len(answers[0].tokens) == len(answers[0].logprobs) == 5


async def test_a_version_that_is_not_served_is_refused(instance: ActorRef[Instance], source: Source) -> None:
    with pytest.raises(WrongVersion, match="a turn asks for version 0 of solver, version None is served"):
        await instance.api.generate(turn(0))
    await instance.api.load(await source.publish(3))
    for version in (2, 4):
        with pytest.raises(WrongVersion, match=f"asks for version {version} of solver, version 3 is served"):
            await instance.api.generate(turn(version))


async def test_new_weights_interrupt_the_turns_under_way(
    instance: ActorRef[Instance], source: Source
) -> None:
    await instance.api.load(await source.publish(0))
    turns = [asyncio.ensure_future(instance.api.generate(turn(0, n, length=3000))) for n in range(6)]
    await asyncio.sleep(0)
    await instance.api.load(await source.publish(1))
    results = await asyncio.gather(*turns)
    assert all((r.finish_reason, r.policy_version) == ("interrupted", 0) for r in results)
    assert (await instance.api.generate(turn(1))).policy_version == 1


async def test_turns_that_may_go_on_come_back_with_what_they_have(
    instance: ActorRef[Instance], source: Source
) -> None:
    await instance.api.load(await source.publish(0))
    asked = [replace(turn(0, n, length=3000), versions=FROM_0) for n in range(6)]
    turns = [asyncio.ensure_future(instance.api.generate(request)) for request in asked[:3]]
    await asyncio.sleep(0)
    await instance.api.generate(turn(0, 6))  # meanwhile they have a few tokens
    turns += [asyncio.ensure_future(instance.api.generate(request)) for request in asked[3:]]
    await asyncio.sleep(0)  # of these one may begin, the others wait
    await instance.api.load(await source.publish(1))
    parts = await asyncio.gather(*turns)
    assert {(part.finish_reason, part.policy_version) for part in parts} == {("interrupted", 0)}
    assert all(part.tokens for part in parts[:3])
    for request, part in zip(asked, parts, strict=True):
        again = replace(request, versions=FROM_1, completion=part.tokens, max_new_tokens=len(part.tokens) + 3)
        rest = await instance.api.generate(again)
        assert rest.prompt_tokens == part.prompt_tokens == (3, 1, 4, 1)
        assert len(rest.tokens) == 3 and rest.text.startswith(part.text)
        tokens, drawn_with = part.tokens + rest.tokens, part.logprobs + rest.logprobs
        old, new = (source.logprobs(version, (3, 1, 4, 1), tokens) for version in (0, 1))
        done = len(part.tokens)
        assert drawn_with == pytest.approx((*old[:done], *new[done:]), abs=1e-4)


async def test_what_goes_on_under_the_same_weights_is_what_one_turn_would_be(
    instance: ActorRef[Instance], source: Source
) -> None:
    published = await source.publish(0)
    await instance.api.load(published)
    request = replace(turn(0, 3, length=1500), versions=FROM_0)
    patient = instance.within(PATIENCE_S)
    whole = await patient.generate(request)
    under_way = asyncio.ensure_future(patient.generate(request))
    await asyncio.sleep(0)
    await instance.api.generate(turn(0, 4))  # meanwhile it has some tokens
    await instance.api.load(published)
    part = await under_way
    assert part.finish_reason == "interrupted" and part.tokens
    rest = await patient.generate(replace(request, prompt=(part.prompt_tokens,), completion=part.tokens))
    assert part.tokens + rest.tokens == whole.tokens and rest.text == whole.text


async def test_a_turn_that_is_given_up_leaves_the_engine(
    instance: ActorRef[Instance], source: Source
) -> None:
    await instance.api.load(await source.publish(0))
    with pytest.raises(CallTimeout):
        await instance.within(0.05).generate(turn(0, length=4000))
    # The batch holds four turns: these would wait behind the abandoned one if it still held a slot for long.
    answers = await asyncio.gather(*(instance.api.generate(turn(0, n)) for n in range(1, 9)))
    assert len(answers) == 8


async def test_a_turn_that_a_lost_worker_left_behind_does_not_refuse_the_same_turn(
    instance: ActorRef[Instance], source: Source
) -> None:
    await instance.api.load(await source.publish(0))
    whole = await instance.api.generate(turn(0, length=50))
    answers = await asyncio.gather(*(instance.api.generate(turn(0, length=50)) for _ in range(3)))
    assert [answer.tokens for answer in answers] == [whole.tokens] * 3


async def test_a_prompt_that_does_not_fit_names_the_lengths(
    instance: ActorRef[Instance], source: Source
) -> None:
    await instance.api.load(await source.publish(0))
    with pytest.raises(PromptTooLong, match="4096") as caught:
        await instance.api.generate(turn(0, prompt="7" * 4093))
    assert (caught.value.prompt_tokens, caught.value.max_context) == (4095, 4096)
    assert (await instance.api.generate(turn(0, 1))).policy_version == 0


async def test_a_request_that_makes_no_sense_is_refused(instance: ActorRef[Instance], source: Source) -> None:
    await instance.api.load(await source.publish(0))
    with pytest.raises(InvalidRequest):
        await instance.api.generate(turn(0, length=0))


class Listener(Actor):
    """A worker that keeps the text of stream 5."""

    def __init__(self) -> None:
        self.text = ""
        self.parts = 0

    @endpoint
    async def take_text(self, stream: int, start: int, text: str) -> None:
        assert (stream, start) == (5, len(self.text)) and text
        self.text += text
        self.parts += 1


async def test_a_turn_s_text_is_sent_while_it_is_generated(
    instance: ActorRef[Instance], source: Source, system: ActorSystem
) -> None:
    await instance.api.load(await source.publish(1))
    listener = Listener()
    to = TextTo(await system.add(listener, "rollout-0"), 5)
    generation = await instance.api.generate(turn(1, length=200), to)
    assert listener.parts > 1 and generation.text.startswith(listener.text)
    alone = await instance.api.generate(turn(1, length=200))
    assert (alone.text, alone.tokens) == (generation.text, generation.tokens)


async def test_a_receiver_that_is_gone_holds_no_turn_up(
    instance: ActorRef[Instance], source: Source, system: ActorSystem
) -> None:
    await instance.api.load(await source.publish(1))
    missing: ActorRef[TextApi] = system.ref("rollout-9", system.address, TextApi)
    assert len((await instance.api.generate(turn(1, length=200), TextTo(missing, 5))).tokens) == 200
