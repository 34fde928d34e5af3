"""The parts of a text, decoded as the tokens come, are the text; a receiver that is slow or gone holds nothing up."""

import itertools
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from flexmarl.actors.chat.tokenizer_codec import TokenizerCodec
from flexmarl.actors.inference.text_stream import TextStream
from flexmarl.actors.messages import TextTo
from flexmarl.core.errors import ActorDead, NoCredit
from flexmarl.core.ref import ActorRef


class Receiver:
    """Stands for a reference: keeps the parts, and raises ``errors`` one after the other."""

    def __init__(self, *errors: Exception | None) -> None:
        self.parts: list[tuple[int, str]] = []
        self.errors = list(errors)

    def tell_nowait(self, endpoint: str, stream: int, start: int, text: str) -> None:
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        assert (endpoint, stream) == ("take_text", 7)
        self.parts.append((start, text))


def stream_to(receiver: Receiver, completion: bytes = b"") -> TextStream:
    """The stream of a model whose tokens are the bytes of UTF-8."""
    to = TextTo(cast(ActorRef[Any], receiver), 7)
    return TextStream(to, lambda tokens: bytes(tokens).decode(errors="replace"), tuple(completion))


@given(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd")), st.data())
def test_the_parts_are_the_text(text: str, data: st.DataObject) -> None:
    receiver, whole = Receiver(), text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    stream = stream_to(receiver, whole[: cuts[0]] if cuts else b"")
    bounds = [*cuts, len(whole)] if cuts else [0, len(whole)]
    for begin, end in itertools.pairwise(bounds):
        stream.take(tuple(whole[begin:end]))
    joined = ""
    for start, part in receiver.parts:
        assert start == len(joined) and part
        joined += part
    if len(bounds) > 1:
        assert joined == text or (bounds[-2] == bounds[-1] and text.startswith(joined))


def test_a_character_of_several_tokens_comes_whole() -> None:
    receiver = Receiver()
    stream = stream_to(receiver)
    for byte in "a\u20acb".encode():
        stream.take((byte,))
    assert receiver.parts == [(0, "a"), (1, "\u20ac"), (2, "b")]


def test_tokens_without_a_text_lose_no_space_between_others() -> None:
    vocabulary = {"<pad>": 0, "a": 1, "b": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    fast: Any = PreTrainedTokenizerFast  # untyped
    codec = TokenizerCodec(fast(tokenizer_object=tokenizer, pad_token="<pad>"))
    receiver = Receiver()
    stream = TextStream(TextTo(cast(ActorRef[Any], receiver), 7), codec.decode, ())
    for token in (1, 0, 0, 2, 1):
        stream.take((token,))
    assert receiver.parts == [(0, "a"), (1, " b"), (3, " a")]


def test_without_credit_the_next_part_takes_the_text_along() -> None:
    receiver = Receiver(
        None, NoCredit("rollout-0", "take_text", 1, 1), NoCredit("rollout-0", "take_text", 1, 1)
    )
    stream = stream_to(receiver)
    for part in (b"a", b"b", b"c", b"d"):
        stream.take(tuple(part))
    assert receiver.parts == [(0, "a"), (1, "bcd")]


def test_a_receiver_that_is_gone_gets_nothing_more() -> None:
    receiver = Receiver(ActorDead("rollout-0", "killed"))
    stream = stream_to(receiver)
    for part in (b"a", b"b"):
        stream.take(tuple(part))
    assert receiver.parts == []


@pytest.mark.parametrize("completion", ["so far", "half a \u20ac"])
def test_the_completion_of_a_resumed_turn_is_sent_again(completion: str) -> None:
    receiver, begun = Receiver(), completion.encode()
    stream = stream_to(receiver, begun[:-1])
    stream.take(tuple(begun[-1:]))
    assert receiver.parts == [(0, completion)]
