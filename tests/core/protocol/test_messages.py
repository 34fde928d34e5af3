"""Messages: joined envelopes and runs come back, the header, and the shape of each kind of envelope."""

import math
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core.errors import LocalProtocolError, RemoteProtocolError
from flexmarl.core.protocol import codec, messages
from flexmarl.core.protocol.codec import Encoder
from flexmarl.core.protocol.envelopes import FIELDS, ITEM_FIELDS, MAGIC, REQUESTS, VERSION, Kind

from ..fuzz_target import valid_envelopes
from .test_codec import plain


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), plain), max_size=40))
def test_joined_envelopes_come_back_in_order(items: list[tuple[int, Any]]) -> None:
    encoder = Encoder()
    body = messages.join([encoder.pack([Kind.REPLY, number, [value]]) for number, value in items])
    assert messages.unpack_envelopes(body) == [[Kind.REPLY, number, [value]] for number, value in items]


requests = st.tuples(
    st.lists(plain, max_size=2), st.dictionaries(st.text(), plain, max_size=2), st.integers(0, 2**63)
)


@given(st.integers(0, 2**62), st.lists(requests, min_size=1, max_size=20), st.sampled_from(sorted(REQUESTS)))
def test_a_run_of_requests_comes_back(first: int, run: list[Any], kind: Kind) -> None:
    encoder = Encoder()
    further = (5,) if kind is Kind.STREAM else ()
    head = messages.RequestHead(kind, "actor", "endpoint", 2.0)
    items = [encoder.pack_items(request) for request in run]
    body = messages.join([head.pack(first, items, encoder.pack_items(further))])
    flat = [field for request in run for field in request]
    assert messages.unpack_envelopes(body) == [[kind, first, "actor", "endpoint", 2.0, *further, flat]]


@given(st.integers(0, 2**62), st.lists(plain, min_size=1, max_size=40))
def test_a_run_of_replies_comes_back(first: int, values: list[Any]) -> None:
    encoder = Encoder()
    packed = messages.REPLIES.pack(first, [encoder.pack_items((value,)) for value in values])
    assert messages.unpack_envelopes(messages.join([packed])) == [[Kind.REPLY, first, values]]


@pytest.mark.parametrize(("actor", "endpoint"), [("a" * 70_000, "e"), ("a", "e" * 70_000)])
def test_names_have_a_limit(actor: str, endpoint: str) -> None:
    with pytest.raises(LocalProtocolError, match="names of .* bytes are over the limit"):
        messages.RequestHead(Kind.CALL, actor, endpoint, 2.0)


UNHOLDABLE = b"\x81\x90\x01"  # a map whose key is a list


def test_a_value_that_python_cannot_hold_fails_its_own_request_of_a_run_and_no_other() -> None:
    good = Encoder().pack_items(([1], {}, 7))
    by_position, by_name = b"\x91" + UNHOLDABLE + b"\x80\x07", b"\x90\x81\xa1x" + UNHOLDABLE + b"\x07"
    head = messages.RequestHead(Kind.CALL, "actor", "endpoint", 2.0)
    run = head.pack(5, [good, by_position, good, by_name])
    ((kind, first, _, _, _, items),) = messages.unpack_envelopes(messages.join([run]))
    assert (kind, first) == (Kind.CALL, 5)
    assert items[:3] == items[6:9] == [[1], {}, 7]
    for at in (3, 9):
        assert isinstance(items[at], messages.Undecodable) and items[at + 1 : at + 3] == [{}, 7]


def test_a_value_that_python_cannot_hold_fails_its_own_reply_of_a_run_and_no_other() -> None:
    run = messages.REPLIES.pack(5, [b"\x01", UNHOLDABLE, b"\x03"])
    item = Encoder().pack([Kind.ITEM, 9, 0, 0])[:-1] + UNHOLDABLE
    one, error, three, failed = messages.unpack_envelopes(messages.join([run, item]))
    assert one == [Kind.REPLY, 5, [1]] and three == [Kind.REPLY, 7, [3]]
    for envelope, number in ((error, 6), (failed, 9)):
        assert envelope[:3] == [Kind.ERROR, number, "!protocol"] and "can't be decoded" in envelope[3]


def test_the_fields_of_an_error_that_python_cannot_hold_are_left_out() -> None:
    error = Encoder().pack([Kind.ERROR, 2, "ValueError", "words", "traceback", "Declared", 0])[:-1]
    ((*fields, declared, left),) = messages.unpack_envelopes(messages.join([error + UNHOLDABLE]))
    assert fields == [Kind.ERROR, 2, "ValueError", "words", "traceback"] and (declared, left) == ("", {})


@pytest.mark.parametrize(
    "packed",
    [
        b"\x92\x05" + UNHOLDABLE,
        b"\x91" + UNHOLDABLE,
        UNHOLDABLE,
        b"\x90" + UNHOLDABLE,
        b"\x96\x01\x01\xa1a\xa1e\xca\x3f\x80\x00\x00" + UNHOLDABLE,
        b"\x96\x01\x01" + UNHOLDABLE + b"\xa1e\xca\x3f\x80\x00\x00\x93\x90\x80\x01",
    ],
)
def test_an_envelope_of_another_shape_that_python_cannot_hold_is_refused(packed: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        messages.unpack_envelopes(messages.join([packed]))


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65_535, 65_536])
def test_any_number_of_envelopes_can_be_joined(count: int) -> None:
    assert codec.unpack(messages.join([b"\x07"] * count)) == [7] * count


# --------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("envelope", valid_envelopes(), ids=lambda e: f"{e[0].name} {e[1]}")
def test_an_envelope_has_the_shape_of_its_kind_or_is_refused(envelope: list[Any]) -> None:
    def refused(fields: Any) -> bool:
        try:
            messages.unpack_envelopes(messages.join([Encoder().pack(fields)]))
        except RemoteProtocolError as error:
            assert "malformed" in str(error)
            return True
        return False

    assert not refused(envelope)
    assert refused(envelope[:-1]) and refused([*envelope, 0]) and refused(tuple(envelope)[1:])
    for index, wanted in enumerate(FIELDS[envelope[0]]):
        wrong: Any
        for wrong in (None, True, 1, 1.5, "text", b"bytes", [], {}, [1.5], -1):
            if wanted is object or type(wrong) is wanted:
                continue
            assert refused([*envelope[:index], wrong, *envelope[index + 1 :]]), (index, wrong)
    for index, wanted in enumerate(ITEM_FIELDS.get(envelope[0], ())):
        for wrong in (None, True, 1.5, "text", b"bytes", [], {}):
            if wanted is object or type(wrong) is wanted:
                continue
            items = [*envelope[-1][:index], wrong, *envelope[-1][index + 1 :]]
            assert refused([*envelope[:-1], items]), (index, wrong)
            assert refused([*envelope[:-1], envelope[-1] + items]), (index, wrong)


@pytest.mark.parametrize("kind", sorted(ITEM_FIELDS))
def test_a_run_holds_whole_requests_and_one_at_least(kind: Kind) -> None:
    (envelope, *_) = (e for e in valid_envelopes() if e[0] is kind)
    for items in [[], envelope[-1][:1], envelope[-1][:2], [*envelope[-1], []]]:
        if items and kind is Kind.REPLY:
            continue
        with pytest.raises(RemoteProtocolError, match="malformed"):
            messages.unpack_envelopes(messages.join([Encoder().pack([*envelope[:-1], items])]))


@pytest.mark.parametrize("kind", sorted(REQUESTS))
@pytest.mark.parametrize("first", [-1, -(2**63), 2**62 + 1, 2**64 - 1])
def test_an_id_that_no_sender_reaches_is_refused(kind: Kind, first: int) -> None:
    (envelope, *_) = (e for e in valid_envelopes() if e[0] is kind)
    envelope[1] = first
    with pytest.raises(RemoteProtocolError, match="malformed"):
        messages.unpack_envelopes(messages.join([Encoder().pack(envelope)]))


@pytest.mark.parametrize("kind", [Kind.CALL, Kind.TELL, Kind.STREAM])
@pytest.mark.parametrize("timeout_s", [math.nan, -1.0, -math.inf])
def test_a_time_that_no_timer_can_be_set_to_is_refused(kind: Kind, timeout_s: float) -> None:
    (envelope, *_) = (e for e in valid_envelopes() if e[0] is kind)
    envelope[4] = timeout_s
    with pytest.raises(RemoteProtocolError, match="malformed"):
        messages.unpack_envelopes(messages.join([Encoder().pack(envelope)]))


@pytest.mark.parametrize("kind", [Kind.DONE, Kind.PONG])
@pytest.mark.parametrize("ids", [[1.5], [[1]], [None], ["1"], [True], [{}], [1, b""]])
def test_a_list_of_ids_holds_numbers(kind: Kind, ids: list[Any]) -> None:
    with pytest.raises(RemoteProtocolError, match="malformed"):
        messages.unpack_envelopes(messages.join([Encoder().pack([kind, 0, ids])]))


@pytest.mark.parametrize(
    "body", [1, None, {}, "text", [1], [None], [[]], [{}], [[[]]], [["CALL"]], [[0]], [[99, 1]]]
)
def test_what_is_no_list_of_envelopes_is_refused(body: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="malformed"):
        messages.unpack_envelopes(Encoder().pack(body))


# --------------------------------------------------------------------------- the header


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=100), st.integers(0, 2**63 - 1))
def test_a_header_comes_back(node: str, epoch: int) -> None:
    header = messages.pack_header(node, epoch)
    assert messages.unpack_header(header) == (node, epoch, len(header))


@given(st.binary(max_size=8000))
def test_a_header_ends_where_the_body_begins(body: bytes) -> None:
    header = messages.pack_header("node", 7)
    assert messages.unpack_header(header + body) == ("node", 7, len(header))
    assert messages.unpack_header(memoryview(header + body)) == ("node", 7, len(header))


@pytest.mark.parametrize(
    "fields", [[MAGIC, VERSION - 1, "n", 1], [MAGIC, VERSION + 1], [MAGIC, 99, None, {}, 5]]
)
def test_a_peer_of_another_version_is_told_both(fields: list[Any]) -> None:
    with pytest.raises(
        RemoteProtocolError, match=f"speaks protocol version {fields[1]}, this side {VERSION}"
    ):
        messages.unpack_header(msgpack.packb(fields))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"GET / HTTP/1.1\r\n",
        b"\xff" * 5000,
        msgpack.packb("flexmarl"),
        msgpack.packb(["other", VERSION, "n", 1]),
        msgpack.packb([MAGIC, VERSION, "n"]),
        msgpack.packb([MAGIC, VERSION, 5, 1]),
        msgpack.packb([MAGIC, VERSION, "n", "e"]),
        msgpack.packb([MAGIC, VERSION, "n", 1, 2]),
        msgpack.packb({MAGIC: VERSION}),
        messages.pack_header("n" * 5000, 1),
        messages.pack_header("node", 1)[:-1],
        b"\xdd\xff\xff\xff\xff" * 800,
    ],
)
def test_a_foreign_header_is_refused(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        messages.unpack_header(header)
