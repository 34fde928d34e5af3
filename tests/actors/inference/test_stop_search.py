"""The end of a turn at a stop string, by any division of its tokens into parts."""

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

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


def result_of(tokens: bytes) -> EngineResult:
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
