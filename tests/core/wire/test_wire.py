"""A link joins what is sent within one tick: in messages, and in runs of requests and replies."""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core.protocol import codec, messages
from flexmarl.core.protocol.envelopes import Kind
from flexmarl.core.protocol.messages import REPLIES, RequestHead
from flexmarl.core.wire.wire import Link

HEADER = messages.pack_header("node", 1)
CALLS, TELLS = (RequestHead(kind, "actor", "endpoint", 1.0) for kind in (Kind.CALL, Kind.TELL))
ITEM = codec.Encoder().pack_items(([], {}, 7))


def new_link() -> tuple[Link, list[list[Any]]]:
    """A link, and the envelopes of each message that it sends."""
    sent: list[list[Any]] = []

    def transmit(frames: list[codec.Bytes]) -> None:
        message, *buffers = frames
        size = messages.unpack_header(message)[2]
        sent.append(messages.unpack_envelopes(message[size:], buffers))

    return Link("a peer", HEADER, transmit), sent


def ids(message: list[Any]) -> list[tuple[int, int, int]]:
    """Kind, first id and number of items of each envelope."""
    width = {Kind.CALL: 3, Kind.TELL: 3, Kind.REPLY: 1}
    return [(e[0], e[1], len(e[-1]) // width[e[0]] if e[0] in width else 0) for e in message]


async def burst(link: Link) -> None:
    """The tick after this expects a burst: nothing leaves before its end."""
    link.send(codec.Encoder().pack([Kind.PING, 1]))
    link.send(codec.Encoder().pack([Kind.PING, 2]))
    await asyncio.sleep(0)


async def test_the_first_request_leaves_at_once_and_those_that_follow_in_its_tick_are_one_run() -> None:
    link, sent = new_link()
    for number in range(1, 6):
        link.send_item(CALLS, number, ITEM)
    assert [ids(message) for message in sent] == [[(Kind.CALL, 1, 1)]]
    await asyncio.sleep(0)
    assert [ids(message) for message in sent[1:]] == [[(Kind.CALL, 2, 4)]]


async def test_a_run_ends_at_another_head_at_a_gap_and_at_another_envelope() -> None:
    link, sent = new_link()
    await burst(link)
    sent.clear()
    for head, number in ((CALLS, 1), (CALLS, 2), (TELLS, 3), (TELLS, 5), (CALLS, 6)):
        link.send_item(head, number, ITEM)
    link.send(codec.Encoder().pack([Kind.PING, 6]))
    link.send_item(CALLS, 7, ITEM)
    link.send_item(REPLIES, 8, b"\xc0")
    link.send_item(REPLIES, 9, b"\xc0")
    await asyncio.sleep(0)
    (message,) = sent
    assert ids(message) == [
        (Kind.CALL, 1, 2), (Kind.TELL, 3, 1), (Kind.TELL, 5, 1), (Kind.CALL, 6, 1), (Kind.PING, 6, 0),
        (Kind.CALL, 7, 1), (Kind.REPLY, 8, 2),
    ]  # fmt: skip


async def test_a_long_burst_leaves_in_parts_that_grow() -> None:
    link, sent = new_link()
    await burst(link)
    sent.clear()
    for number in range(1000):
        link.send_item(CALLS, number, ITEM)
    await asyncio.sleep(0)
    sizes = [sum(items for _, _, items in ids(message)) for message in sent]
    assert sizes == [64, 128, 256, 256, 256, 40]
    sent.clear()
    for number in range(100):
        link.send_item(REPLIES, number, b"\xda\x40\x00" + b"x" * 2**14)
    await asyncio.sleep(0)
    assert all(len(message[0][2]) <= 5 for message in sent), "a message is no longer than 64 KiB and an item"


async def test_what_is_forgotten_does_not_leave() -> None:
    link, sent = new_link()
    await burst(link)
    sent.clear()
    link.send(codec.Encoder().pack([Kind.PING, 1]))
    link.send_item(CALLS, 1, ITEM)
    link.forget_unsent()
    link.send_item(CALLS, 2, ITEM)
    await asyncio.sleep(0)
    assert [ids(message) for message in sent] == [[(Kind.CALL, 2, 1)]]


STEPS = st.sampled_from(
    ["call", "tell", "reply", "call with buffer", "reply with buffer", "ping", "tick", "flush"]
)


@given(st.lists(STEPS, max_size=60))
def test_all_that_is_sent_arrives_once_and_in_order(steps: list[str]) -> None:
    async def main() -> None:
        link, sent = new_link()
        wanted = []
        for number, step in enumerate(steps, 1):
            buffers = [b"buffer"] if step.endswith("buffer") else []
            match step.split():
                case ["call", *_]:
                    link.send_item(CALLS, number, ITEM, buffers)
                    wanted.append((Kind.CALL, number))
                case ["tell"]:
                    link.send_item(TELLS, number, ITEM)
                    wanted.append((Kind.TELL, number))
                case ["reply", *_]:
                    link.send_item(REPLIES, number, b"\xd5\x01\0\0" if buffers else b"\xc0", buffers)
                    wanted.append((Kind.REPLY, number))
                case ["ping"]:
                    link.send(codec.Encoder().pack([Kind.PING, number]))
                    wanted.append((Kind.PING, number))
                case ["tick"]:
                    await asyncio.sleep(0)
                case ["flush"]:
                    link.flush()
        await asyncio.sleep(0)
        arrived = [
            (kind, first + index)
            for message in sent
            for kind, first, items in ids(message)
            for index in range(max(items, 1))
        ]
        assert arrived == wanted

    asyncio.run(main())
