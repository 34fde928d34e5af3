"""Messages in MessagePack: what is sent comes back, and rubbish is refused without harm."""

from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flexmarl.core import codec
from flexmarl.core.errors import LocalProtocolError, RemoteProtocolError
from flexmarl.core.messages import Kind

from .echo import Echo, Point

HEADER = codec.pack_header("tests")
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), plain), max_size=5))
def test_joined_envelopes_come_back_in_order(items: list[tuple[int, Any]]) -> None:
    body = codec.join([codec.pack([Kind.REPLY, call_id, value]) for call_id, value in items])
    assert codec.unpack_message(HEADER, body) == [[Kind.REPLY, call_id, value] for call_id, value in items]


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_rubbish_is_a_protocol_error(header: bytes, body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        codec.unpack_message(header, body)
    try:
        envelopes = codec.unpack_message(HEADER, body)
    except RemoteProtocolError:
        return
    assert all(envelope[0] in Kind for envelope in envelopes)


@given(st.lists(plain, max_size=7))
def test_an_envelope_of_the_wrong_shape_is_refused(fields: list[Any]) -> None:
    with pytest.raises(RemoteProtocolError, match="malformed"):
        codec.unpack_message(HEADER, codec.join([codec.pack(["no kind", *fields])]))


def test_an_older_peer_is_told_both_versions() -> None:
    with pytest.raises(RemoteProtocolError, match="the peer speaks protocol version 0, this side 1"):
        codec.unpack_message(codec.pack(["flexmarl", 0, "old"]), codec.pack([]))


def test_a_message_can_build_no_object() -> None:
    body = codec.join([msgpack.packb([int(Kind.REPLY), 1, msgpack.ExtType(42, b"os.system")])])
    ((_, _, value),) = codec.unpack_message(HEADER, body)
    assert value == msgpack.ExtType(42, b"os.system")  # inert: a code and bytes
    signature = codec.signature_of(Echo, "move")
    assert signature is not None
    with pytest.raises(RemoteProtocolError, match="result of Echo.move"):
        signature.result(value, None)


@given(st.integers(-(2**63), 2**63 - 1), st.lists(st.text(), max_size=3))
def test_dataclasses_come_back_through_their_annotation(x: int, labels: list[str]) -> None:
    signature = codec.signature_of(Echo, "move")
    assert signature is not None
    sent = msgpack.unpackb(codec.pack([Point(x, tuple(labels))]))
    assert signature.arguments(sent, {}, None) == {"point": Point(x, tuple(labels))}


@given(st.text(st.characters(exclude_categories=())))
@example("\ud83d")
def test_any_text_can_be_sent_and_half_characters_arrive_as_their_escapes(text: str) -> None:
    arrived = msgpack.unpackb(codec.pack({text: [text]}))
    escaped = text.encode(errors="backslashreplace").decode()
    assert arrived == {escaped: [escaped]}


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: None, 2**70])
def test_what_is_no_message_is_refused_where_it_is_sent(value: Any) -> None:
    with pytest.raises(LocalProtocolError):
        codec.pack([value])
