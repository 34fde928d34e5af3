"""A peer whose messages a test writes by hand."""

from flexmarl.core.protocol import codec, envelopes, messages
from flexmarl.core.protocol.envelopes import Kind
from flexmarl.core.wire.wire import Frames, Link


class Stranger:
    """Sends what it likes to a system and keeps what it is answered (``wire.Listener``)."""

    def __init__(self) -> None:
        self.answers: list[list[envelopes.Envelope]] = []
        self.header = b""
        self.replies: list[int] = []
        self.marks: list[int] = []
        self.reads = False
        """Confirms what it receives, also after the first reply."""

    def received(self, link: Link, message: codec.Bytes, buffers: Frames) -> None:
        answer = messages.unpack_envelopes(message[messages.unpack_header(message)[2] :], buffers)
        if any(kind != Kind.PING for kind, *_ in answer):
            self.answers.append([envelope for envelope in answer if envelope[0] != Kind.PING])
        for kind, number, *fields in answer:
            if kind == Kind.REPLY:
                self.replies += range(number, number + len(fields[0]))
            elif kind == Kind.PING:
                self.marks.append(number)
                if self.reads or not self.replies:
                    link.send(packed(Kind.PONG, number, []))

    def connected(self, link: Link) -> None: ...

    def disconnected(self, link: Link, reason: str) -> None: ...

    def refused(self, link: Link, reason: str) -> None: ...

    def crashed(self) -> None: ...


def packed(*envelope: object) -> bytes:
    return codec.Encoder().pack(envelope)
