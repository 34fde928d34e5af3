"""The end of a turn at a stop string, by any division of its tokens into parts, and wherever it was interrupted."""

import string
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from flexmarl.actors.inference.engines.engine import EngineResult
from flexmarl.actors.inference.stop_search import StopSearch


def decode(tokens: tuple[int, ...]) -> str:
    """Each token is a byte of UTF-8, but 0, which is special."""
    return bytes(token for token in tokens if token).decode(errors="replace")


def plain_end(completion: bytes, tokens: bytes, stops: Sequence[str]) -> int | None:
    """The number of tokens with which the text first contains a stop string."""
    for end in range(1, len(tokens) + 1):
        if any(stop in decode(tuple(completion + tokens[:end])) for stop in stops):
            return end
    return None


def result_of(tokens: Sequence[int]) -> EngineResult:
    return EngineResult("q", tuple(tokens), tuple(-float(n) for n in range(len(tokens))), "length")


texts = st.text("abé", max_size=12).map(str.encode)


@given(texts, texts, st.lists(st.text("abé", min_size=1, max_size=3), min_size=1, max_size=2), st.data())
def test_the_end_is_the_token_that_completes_a_stop_string(
    completion: bytes, tokens: bytes, stops: list[str], data: st.DataObject
) -> None:
    assume(not any(stop in completion.decode() for stop in stops))
    search = StopSearch(stops, decode, tuple(completion))
    given_away: tuple[int, ...] = ()
    handed_out = data.draw(st.integers(0, len(tokens)))
    start = 0
    while start < handed_out:
        end = data.draw(st.integers(start + 1, handed_out))
        given_away += search.take(tuple(tokens[start:end]))
        start = end
    result = search.ended(result_of(tokens))
    end_at = plain_end(completion, tokens, stops)
    if end_at is None:
        assert result == result_of(tokens) and not search.is_found
    else:
        assert result.tokens == tuple(tokens[:end_at]) and result.finish_reason == "stop"
        assert len(result.logprobs) == end_at
    assert given_away == result.tokens[: len(given_away)]


@pytest.mark.parametrize("stop", ["</a>", "a>"])
def test_a_stop_string_may_begin_in_the_completion(stop: str) -> None:
    search = StopSearch([stop], decode, tuple(b"x</"))
    assert search.ended(result_of(b"a>b")).tokens == tuple(b"a>")


def test_special_tokens_have_no_text() -> None:
    search = StopSearch(["ab"], decode, ())
    assert search.ended(result_of(b"a\0b\0")).tokens == tuple(b"a\0b")


WORDS = (b"</", b"a>", b"a\xc3", b"\xa9b", b"\x82\xac>", b"> \xf0\x9f", b"\x98", b"\x80 ")
"""Tokens of several bytes, some of which begin or end within a character, as those of byte-level tokenizers do."""


def byte_level() -> Tokenizer:
    """The bytes, and then WORDS. Each byte is written as a printable character, as in GPT-2 and Qwen."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    written = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    words = [bytes([byte]) for byte in range(256)] + list(WORDS)
    vocabulary = {"".join(written[byte] for byte in word): number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """The bytes, for characters that no other token has, then a space and ASCII letters, as in Llama 2."""
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581", *string.ascii_letters, "</", "a>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def parts_of(characters: str, *others: int) -> "st.SearchStrategy[tuple[int, ...]]":
    """The bytes of a character, or one of the other tokens."""
    return st.sampled_from([tuple(character.encode()) for character in characters] + [(n,) for n in others])


TOKENIZERS = {
    "byte-level": (byte_level(), parts_of("a>é€😀</ b\n", 0xE2, *range(256, 256 + len(WORDS)))),
    "byte-fallback": (byte_fallback(), parts_of("é€😀\n", 0xE2, 256, 257, 258, 309, 310)),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_an_interruption_between_any_two_tokens_changes_nothing(kind: str, data: st.DataObject) -> None:
    tokenizer, parts = TOKENIZERS[kind]

    def text_of(tokens: tuple[int, ...]) -> str:
        text: str = tokenizer.decode(list(tokens))
        return text

    tokens: tuple[int, ...] = sum(data.draw(st.lists(parts, min_size=1, max_size=12)), ())
    text = text_of(tokens).replace("\ufffd", "")
    begin = data.draw(st.integers(0, len(text)))
    stops = [
        text[begin : begin + data.draw(st.integers(1, 4))] or "<é>",
        data.draw(st.text("a>é€", min_size=1)),
    ]
    # The search in the whole text, of which a character at the end may be incomplete.
    texts = [text_of(tokens[:number]).rstrip("\ufffd") for number in range(len(tokens) + 1)]
    ends = (number for number, text in enumerate(texts) if any(stop in text for stop in stops))
    end = next(ends, len(tokens))
    for interrupted in range(end):
        search = StopSearch(stops, text_of, tokens[:interrupted])
        result = search.ended(result_of(tokens[interrupted:]))
        assert result.tokens == tokens[interrupted:end], (stops, interrupted)
