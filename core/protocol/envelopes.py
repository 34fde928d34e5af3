"""Messages between two actor systems.

One ZeroMQ message is a frame of two MessagePack arrays, the header ``[MAGIC, VERSION, node, epoch]`` (``epoch``: the
sender's incarnation, see ``incarnations.py``) and the body, an array of envelopes, and then the raw buffers that the
envelopes refer to by index. Envelopes that were queued for a peer within one tick of the loop share a message. An
envelope is one of

    [CALL,   id, actor, endpoint, timeout_s, requests]                     each is answered once
    [TELL,   id, actor, endpoint, timeout_s, requests]                     not answered
    [STREAM, id, actor, endpoint, timeout_s, window, requests]             answered by up to ``window`` items more than
                                                                           were granted, then a REPLY
    [REPLY,  id, [value, ...]]
    [ERROR,  id, kind, message, traceback, declared, fields]
    [ITEM,   id, number, value]                 items of a stream are counted from 0; its REPLY's value is their number
    [CANCEL, id]                           the caller has given up; the request is answered all the same; or, below 0,
                                           all requests up to ``-id`` are withdrawn
    [GRANT,  id, count]                    the stream ``id`` may send so many more items
    [DONE,   0, [first, last, ...]]        the one-way messages of these ranges of ids have been processed
    [PING,   last]                         ``last``: the id of the newest request sent on this link; or, below 0, a mark
                                           among large answers, whose PONG confirms all messages before it
    [PONG,   last, [id, ...]]              answers PING: of the requests up to ``last``, these are still being served
    [REFUSE, 0, reason]                    the peer's message is malformed; the same in every protocol version
    [BYE,    0]                            the sender leaves

Requests and replies come in runs: ``requests`` is a list ``[args, kwargs, trace_id, args, kwargs, trace_id, ...]``. The
first request of a run has the id ``id``, the next one ``id + 1``, and so on; likewise the values of a REPLY.

Ids are counted per link and direction: every request (a call, TELL or STREAM) has one, ascending without a gap, so that
the receiver can distinguish a duplicate from a late message. ``declared``: the name of the class that the endpoint
declares for this error, with its ``fields``; "" and an empty map for any other error.
"""

from enum import IntEnum, StrEnum
from typing import Any

MAGIC = "flexmarl"
VERSION = 4


class Kind(IntEnum):
    # A number is used once: REFUSE has the same one in every version of the protocol.
    CALL = 1
    TELL = 3
    STREAM = 4
    REPLY = 5
    ERROR = 6
    ITEM = 7
    CANCEL = 8
    GRANT = 9
    DONE = 10
    PING = 11
    PONG = 12
    REFUSE = 13
    BYE = 14


class Fault(StrEnum):
    """The kinds of ERROR that the runtime itself sends; every other kind is the name of an exception's class."""

    DEAD = "!dead"
    PROTOCOL = "!protocol"
    CANCELLED = "!cancelled"
    EXPIRED = "!expired"
    OUT_OF_ORDER = "!out of order"
    NOT_ALLOWED = "!not allowed"


_REQUEST = (int, int, str, str, float)

# The types of the fields of each kind of envelope: checked before an envelope is processed.
FIELDS: dict[int, tuple[type, ...]] = {
    Kind.CALL: (*_REQUEST, list),
    Kind.TELL: (*_REQUEST, list),
    Kind.STREAM: (*_REQUEST, int, list),
    Kind.REPLY: (int, int, list),
    Kind.ERROR: (int, int, str, str, str, str, dict),
    Kind.ITEM: (int, int, int, object),
    Kind.CANCEL: (int, int),
    Kind.GRANT: (int, int, int),
    Kind.DONE: (int, int, list),
    Kind.PING: (int, int),
    Kind.PONG: (int, int, list),
    Kind.REFUSE: (int, int, str),
    Kind.BYE: (int, int),
}

REQUESTS = frozenset({Kind.CALL, Kind.TELL, Kind.STREAM})

# The fields of each item of a run, which is the last field of its envelope.
ITEM_FIELDS: dict[int, tuple[type, ...]] = {
    **dict.fromkeys(REQUESTS, (list, dict, int)),
    Kind.REPLY: (object,),
}

Envelope = list[Any]
