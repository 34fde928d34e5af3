"""What travels between two actor systems.

One ZeroMQ message is two frames: a header ``[MAGIC, VERSION, sender]`` and a body, a MessagePack array of
envelopes. All envelopes that were queued for a peer within one tick of the loop share a message. An envelope
is one of

    [CALL,   call_id, actor, endpoint, timeout_s, args, kwargs]
    [TELL,   0,       actor, endpoint, 0.0,       args, kwargs]
    [REPLY,  call_id, value]
    [ERROR,  call_id, kind, message, traceback]
    [CANCEL, call_id]
"""

from enum import IntEnum
from typing import Any

MAGIC = "flexmarl"
VERSION = 1


class Kind(IntEnum):
    CALL = 1
    TELL = 2
    REPLY = 3
    ERROR = 4
    CANCEL = 5


# The number of fields of each kind of envelope: checked before anything is read from one.
FIELDS = {Kind.CALL: 7, Kind.TELL: 7, Kind.REPLY: 3, Kind.ERROR: 5, Kind.CANCEL: 2}

Envelope = list[Any]
