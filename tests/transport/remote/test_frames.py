"""The messages between a reader of states and their owner."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.transport.host_memory.block import CHUNK_BYTES
from flexmarl.transport.remote.frames import (
    MOST_RANGE_BYTES,
    REPLY_BYTES,
    Answer,
    BadFrame,
    Join,
    Leave,
    NamedRange,
    Open,
    Read,
    Reply,
    Request,
    Requests,
    decode_relay,
    encode_relay,
)
from flexmarl.transport.remote.relays import Relay

WORDS = st.integers(0, 2**64 - 1)
opens = st.builds(Open, st.text(max_size=200), WORDS, WORDS, st.none() | WORDS)
reads = st.builds(
    lambda chunk, size, delta: Read(chunk * CHUNK_BYTES, chunk * CHUNK_BYTES + size, delta),
    st.integers(0, 2**40),
    st.integers(1, MOST_RANGE_BYTES),
    st.booleans(),
)
names = st.builds(
    lambda name, start, size: NamedRange(name, start, start + size),
    st.text(max_size=200),
    st.integers(0, 2**40),
    st.integers(1, 2**40),
)
relays = st.builds(Relay, st.text(max_size=60), st.text(max_size=60), WORDS)
versions = st.builds(Open, st.text(max_size=100), WORDS, WORDS, st.none() | WORDS)
any_request = opens | reads | names | st.builds(Join, versions, relays) | st.builds(Leave, versions, relays)


@given(st.lists(any_request, max_size=8), st.lists(st.integers(0, 600), max_size=20))
def test_requests_come_out_as_they_went_in_however_they_are_cut(
    requests: list[Request], cuts: list[int]
) -> None:
    sent = b"".join(request.encode() for request in requests)
    decoder, found, start = Requests(), [], 0
    for cut in [*sorted(cuts), len(sent)]:
        found += decoder.feed(sent[start:cut])
        start = max(start, cut)
    assert found == requests


@given(st.binary(max_size=400))
def test_any_bytes_are_requests_or_refused(received: bytes) -> None:
    decoder = Requests()
    try:
        for request in decoder.feed(received):
            assert isinstance(request, (Join, Leave, NamedRange, Open, Read))
    except BadFrame:
        pass


@given(any_request, st.integers(0, 100), st.integers(0, 255))
def test_a_changed_byte_never_makes_an_impossible_request(request: Request, where: int, byte: int) -> None:
    sent = bytearray(request.encode())
    sent[where % len(sent)] = byte
    try:
        found = Requests().feed(bytes(sent))
    except BadFrame:
        return
    for one in found:
        if isinstance(one, Read):
            assert 0 < one.end - one.start <= MOST_RANGE_BYTES and one.start % CHUNK_BYTES == 0


@pytest.mark.parametrize(
    "request_",
    [
        NamedRange("x", 5, 5),
        Read(0, 0),
        Read(CHUNK_BYTES, 5),
        Read(1, 2),
        Read(0, MOST_RANGE_BYTES + 1),
        Open("x" * 2000, 0, 0),
    ],
)
def test_impossible_requests_are_refused(request_: Request) -> None:
    with pytest.raises(BadFrame):
        Requests().feed(request_.encode())


def test_another_program_is_refused_at_once() -> None:
    with pytest.raises(BadFrame, match="another program"):
        Requests().feed(b"GET / HTTP/1.1\r\n")


@given(st.sampled_from(Answer), WORDS, WORDS, st.booleans())
def test_replies_come_out_as_they_went_in(answer: Answer, size: int, number: int, has_base: bool) -> None:
    reply = Reply(answer, size, number, has_base)
    assert len(reply.encode()) == REPLY_BYTES
    assert Reply.decode(reply.encode()) == reply


@given(st.binary(min_size=REPLY_BYTES, max_size=REPLY_BYTES))
def test_any_bytes_are_a_reply_or_refused(received: bytes) -> None:
    with pytest.raises(BadFrame):
        Reply.decode(b"FXB1\0" + received[5:])
    try:
        assert Reply.decode(b"FXB1" + received[4:]).answer in Answer
    except BadFrame:
        pass


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply(Answer.OPENED, 17), {"chunks": 2}),
        (Reply(Answer.RAW, 16), {"chunks": 2}),
        (Reply(Answer.STALE, 1), {"chunks": 2}),
        (Reply(Answer.RAW, 2**60), {"range_bytes": 100}),
        (Reply(Answer.RAW, 99), {"range_bytes": 100}),
        (Reply(Answer.DELTA, 100), {"range_bytes": 100}),
        (Reply(Answer.OPENED, 100), {"range_bytes": 100}),
    ],
)
def test_sizes_are_checked_before_memory_is_allocated(reply: Reply, expected: dict[str, int]) -> None:
    with pytest.raises(BadFrame, match=reply.answer.name):
        reply.check(**expected)


@given(relays, st.binary(max_size=20))
def test_a_copy_comes_out_as_it_went_in(relay: Relay, rest: bytes) -> None:
    assert decode_relay(encode_relay(relay) + rest) == (relay, rest)


@given(st.binary(max_size=100))
def test_any_bytes_are_a_copy_or_refused(received: bytes) -> None:
    try:
        relay, rest = decode_relay(received)
    except BadFrame:
        return
    assert encode_relay(relay) + rest == received


@pytest.mark.parametrize("reply", [Reply(Answer.OPENED, 8), Reply(Answer.JOINED, 1 << 20)])
def test_the_size_of_a_copy_is_checked_before_memory_is_allocated(reply: Reply) -> None:
    with pytest.raises(BadFrame, match=f"{reply.answer.name} with {reply.size_bytes} bytes"):
        reply.check_joined()
    assert Reply(Answer.JOINED, 0).check_joined()
