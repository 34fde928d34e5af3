"""Messages in MessagePack: what is sent comes back, and rubbish is refused without harm."""

import json
import tracemalloc
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from flexmarl.core.errors import LocalProtocolError, RemoteProtocolError
from flexmarl.core.protocol import codec, messages
from flexmarl.core.protocol.codec import Buffer, Encoder
from flexmarl.core.protocol.envelopes import Kind

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=50),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 99), inner, max_size=4)
    ),
    max_leaves=12,
)


@dataclass
class Point:
    x: int
    tags: list[Any]


class Model(BaseModel):
    name: str
    point: Point


class Wired:
    def __wire__(self) -> dict[str, int]:
        return {"wired": 1}


@given(plain)
def test_plain_data_comes_back(value: Any) -> None:
    encoder = Encoder()
    assert codec.unpack(encoder.pack(value)) == value
    assert encoder.take_buffers() == []


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (Point(3, ["a"]), {"x": 3, "tags": ["a"]}),
        (Model(name="n", point=Point(1, [])), {"name": "n", "point": {"x": 1, "tags": []}}),
        (Wired(), {"wired": 1}),
        (PurePosixPath("/a/b"), "/a/b"),
        (Kind.PING, 11),
        ((1, (2,)), [1, [2]]),
        ([Point(1, [Wired()])], [{"x": 1, "tags": [{"wired": 1}]}]),
    ],
)
def test_objects_are_sent_as_their_fields(value: Any, sent: Any) -> None:
    assert codec.unpack(Encoder().pack(value)) == sent


def test_a_registered_type_and_its_subclasses_are_sent_as_their_encoder_says() -> None:
    class Celsius:
        degrees = 20

    class Warm(Celsius):
        degrees = 30

    with pytest.raises(LocalProtocolError, match="Celsius can't be sent"):
        Encoder().pack(Celsius())
    codec.register_encoder(Celsius, lambda value: {"degrees": value.degrees})
    assert codec.unpack(Encoder().pack([Celsius(), Warm()])) == [{"degrees": 20}, {"degrees": 30}]


@given(st.lists(st.binary(max_size=30), max_size=8), st.integers(0, 30))
def test_buffers_travel_inline_or_aside(contents: list[bytes], inline_bytes: int) -> None:
    encoder = Encoder(inline_bytes=inline_bytes)
    packed = encoder.pack({"all": [Buffer(content) for content in contents]})
    buffers = encoder.take_buffers()
    assert [bytes(buffer) for buffer in buffers] == [c for c in contents if len(c) > inline_bytes]
    assert codec.unpack(packed, buffers) == {"all": contents}
    assert encoder.take_buffers() == []


def test_a_buffer_is_not_copied_on_its_way() -> None:
    content = bytearray(10_000)
    encoder = Encoder()
    packed = encoder.pack([Buffer(content)])
    buffers = encoder.take_buffers()
    content[0] = 42
    (arrived,) = codec.unpack(packed, buffers)
    assert arrived[0] == 42


def test_a_buffer_wants_contiguous_bytes() -> None:
    assert Buffer(memoryview(b"12345678").cast("I")).view.nbytes == 8
    for wrong in (memoryview(b"1234")[::2], "text", 3):
        with pytest.raises(TypeError):
            Buffer(wrong)


def test_a_message_without_frames_holds_its_buffers() -> None:
    whole = Encoder(inline_bytes=codec.MAX_BODY_BYTES)
    packed = whole.pack([Buffer(bytes(100_000))])
    assert whole.take_buffers() == [] and codec.unpack(packed) == [bytes(100_000)]
    with pytest.raises(LocalProtocolError, match="over the limit|without frames"):
        whole.pack([Buffer(bytes(codec.MAX_BODY_BYTES + 1))])
    assert whole.take_buffers() == []


any_text = st.text(st.characters(exclude_categories=()), max_size=4)


@given(st.recursive(any_text, lambda inner: st.lists(inner) | st.dictionaries(any_text, inner), max_leaves=8))
@example("\ud83d")
@example({"\udcff": 1})
def test_a_text_arrives_exactly_or_is_refused(value: Any) -> None:
    encoder = Encoder()
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        with pytest.raises(LocalProtocolError, match="half of a surrogate pair") as refused:
            encoder.pack([Buffer(bytes(5000)), value])
        str(refused.value).encode()
        assert codec.unpack(encoder.pack([1])) == [1] and encoder.take_buffers() == []
    else:
        assert codec.unpack(encoder.pack(value)) == value


@dataclass
class Note:
    id: str
    data: dict[str, Any]


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (Note("q\ud83d", {}), r"id is 'q\ud83d'"),
        ([1, Note("q", {"notes": ("a", ["b", "\udcff"])})], r"[1].data.notes[1][1] is '\udcff'"),
        (Note("q", {"\ud83d": 1}), r"a key of data is '\ud83d'"),
        ({"\U0001f600": "\ud83d"}, "\U0001f600 is '\\ud83d'"),
        ("\ud83d", r"'\ud83d'"),
        ("x" * 100 + "\ud83d", "'" + "x" * 79 + "..."),
    ],
)
def test_the_place_of_half_a_character_is_named(value: Any, place: str) -> None:
    with pytest.raises(LocalProtocolError) as refused:
        Encoder().pack(value)
    assert str(refused.value).startswith(f"{place}: half of a surrogate pair")


class Broken:
    def __wire__(self) -> Any:
        raise KeyError("its own")


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: None, 2**70, Point, Encoder, 1j])
def test_what_is_no_message_is_refused_where_it_is_sent(value: Any) -> None:
    encoder = Encoder()
    with pytest.raises(LocalProtocolError):
        encoder.pack([Buffer(bytes(5000)), value])
    assert codec.unpack(encoder.pack([1])) == [1] and encoder.take_buffers() == []


def test_an_error_of_the_users_own_comes_through_and_leaves_nothing_behind() -> None:
    encoder = Encoder()
    with pytest.raises(KeyError, match="its own"):
        encoder.pack([Buffer(bytes(5000)), Broken()])
    assert codec.unpack(encoder.pack([1])) == [1] and encoder.take_buffers() == []


def test_a_value_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(LocalProtocolError, match="recursion"):
        Encoder().pack(endless)


# --------------------------------------------------------------------------- limits


def test_a_message_has_a_limit_of_bytes() -> None:
    with pytest.raises(LocalProtocolError, match="over the limit.*arrays or Buffers"):
        Encoder().pack(bytes(codec.MAX_ENVELOPE_BYTES))
    largest = Encoder().pack(bytes(codec.MAX_ENVELOPE_BYTES - 5))
    queued_before = [b"\xc0" * 2**20]  # see wire.Link: a body is that much larger than its largest envelope
    assert len(b"".join([largest, *queued_before])) <= codec.MAX_BODY_BYTES
    with pytest.raises(RemoteProtocolError, match="over the limit"):
        codec.unpack(bytes(codec.MAX_BODY_BYTES + 1))


def test_a_message_has_a_limit_of_values() -> None:
    with pytest.raises(LocalProtocolError, match="values is over the limit"):
        Encoder().pack([[]] * (codec.MAX_ENVELOPE_ITEMS + 1))
    most = Encoder().pack([None] * (codec.MAX_ENVELOPE_ITEMS - 1))
    assert len(codec.unpack(most)) == codec.MAX_ENVELOPE_ITEMS - 1


def test_a_message_has_a_limit_of_buffers() -> None:
    encoder = Encoder(inline_bytes=0)
    encoder.pack([Buffer(b"x")] * codec.MAX_BUFFERS)
    assert len(encoder.take_buffers()) == codec.MAX_BUFFERS
    with pytest.raises(LocalProtocolError, match="more than 1024 buffers"):
        encoder.pack([Buffer(b"x")] * (codec.MAX_BUFFERS + 1))
    with pytest.raises(RemoteProtocolError, match="buffers are over the limit"):
        codec.unpack(b"\xc0", [b""] * (codec.MAX_BUFFERS + 1))


def test_nesting_has_a_limit_at_both_ends() -> None:
    deep: Any = None
    for _ in range(1022):
        deep = [deep]
    assert messages.unpack_envelopes(
        messages.join([messages.REPLIES.pack(1, [Encoder().pack_items((deep[0][0],))])])
    )
    with pytest.raises(LocalProtocolError, match="recursion"):
        Encoder().pack_items((deep,))
    with pytest.raises(RemoteProtocolError):
        codec.unpack(b"\x91" * 2000 + b"\xc0")
    with pytest.raises(RemoteProtocolError):
        codec.unpack(b"\x81\x01" * 2000 + b"\xc0")


HUGE = 2**32 - 1
CLAIMS = {
    "array": b"\xdd" + HUGE.to_bytes(4, "big"),
    "map": b"\xdf" + HUGE.to_bytes(4, "big"),
    "map of arrays": b"\xdf" + HUGE.to_bytes(4, "big") + b"\xdd" + HUGE.to_bytes(4, "big"),
    "text": b"\x91\xdb" + HUGE.to_bytes(4, "big"),
    "bytes": b"\x91\xc6" + HUGE.to_bytes(4, "big"),
    "extension": b"\x91\xc9" + HUGE.to_bytes(4, "big") + b"\x01",
}


@pytest.mark.parametrize("what", CLAIMS)
@pytest.mark.parametrize("depth", [1, 50, 1000])
@pytest.mark.parametrize("padding", [0, 2000])
def test_what_is_claimed_and_not_there_takes_no_memory(what: str, depth: int, padding: int) -> None:
    body = CLAIMS[what] * depth + b"\xc0" * padding
    assert _peak_bytes(body) < 3_000_000 + 3 * len(body)


@pytest.mark.parametrize("size", [500, 1024])
def test_small_bodies_that_nest_what_they_could_just_hold_take_little_memory(size: int) -> None:
    claim = b"\xdc" + size.to_bytes(2, "big")
    assert _peak_bytes(claim * (size // 3)) < 4_000_000


def test_a_body_of_empty_lists_takes_bounded_memory() -> None:
    body = b"\xdd" + (2**23).to_bytes(4, "big") + b"\x90" * 2**23
    assert _peak_bytes(body) < 100 * 2**20
    body = (b"\xdc\xff\xff" + b"\x90" * 65_535) * 120
    body = b"\xdc\x00\x78" + body
    assert _peak_bytes(body) < 90 * codec.MAX_BODY_ITEMS


def _peak_bytes(body: bytes) -> int:
    """The cost of refusing ``body`` takes."""
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            messages.unpack_envelopes(body)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --------------------------------------------------------------------------- rubbish


@pytest.mark.parametrize("code", [0, 1, 2, 42, 127, -2])
@pytest.mark.parametrize("content", [b"", b"\x00", b"\x00\x00", b"\x00\x02", b"\xff\xff", bytes(4)])
def test_extensions_stand_for_buffers_and_nothing_else(code: int, content: bytes) -> None:
    packed = msgpack.packb([msgpack.ExtType(code, content)]) if code >= 0 else b"\x91\xd4\xfe\x00"
    buffers = [b"zero", b"one"]
    if code == 1 and content == b"\x00\x00":
        assert codec.unpack(packed, buffers) == [b"zero"]
    else:
        with pytest.raises(RemoteProtocolError, match="stands for no buffer"):
            codec.unpack(packed, buffers)
    with pytest.raises(RemoteProtocolError, match="without a buffer"):
        codec.unpack(packed)


def test_a_timestamp_becomes_a_number() -> None:
    assert codec.unpack(msgpack.packb(msgpack.Timestamp(3, 5))) == 3_000_000_005


@given(st.binary(max_size=200), st.lists(st.binary(max_size=3), max_size=2))
@example(b"\x81\x90\x01", [])
@example(b"\xc1", [])
@example(b"\x90\x90", [])
@example(b"", [])
@example(b"\xc7\x0c\xff" + b"\xff" * 12, [])
def test_rubbish_is_a_protocol_error_or_plain_data(body: bytes, buffers: list[bytes]) -> None:
    try:
        codec.unpack(body, buffers)
        envelopes = messages.unpack_envelopes(body, buffers)
    except RemoteProtocolError:
        return
    assert all(envelope[0] in list(Kind) for envelope in envelopes)


def test_bytes_that_may_change_are_copied_and_no_others() -> None:
    changing, fixed = bytearray(b"ab"), b"cd"
    kept = codec.unchanging([Buffer(changing).view, Buffer(fixed).view])
    changing[:] = b"xy"
    assert [bytes(view) for view in kept] == [b"ab", b"cd"]
    assert kept[1].obj is fixed
