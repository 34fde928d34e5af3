"""The processes of one host that a launcher has started: local rank 0 works, the others wait and take its status.

They meet at a socket with a name in the kernel, which leaves nothing behind: a follower's connection ends with local
rank 0, however it ends.
"""

import contextlib
import os
import socket
import time
from typing import Final, Self

import xxhash

_MEET_S: Final = 60.0
"""The longest wait of one for the other. The processes are started at the same time, but may be slow to import."""
_RETRY_S: Final = 0.1
_ENDED_WITHOUT_STATUS: Final = 1


class Leader:
    """Local rank 0. ``followers``: the number of the other processes of its host."""

    def __init__(self, gathering: str, followers: int) -> None:
        self._followers = followers
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._address = _address(gathering)

    def __enter__(self) -> Self:
        """Raises OSError if there is another local rank 0."""
        try:
            self._socket.bind(self._address)
            self._socket.listen(max(1, self._followers))  # all of them may wait there to be accepted
        except OSError as error:
            self._socket.close()
            raise OSError(
                error.errno,
                f"local rank 0 can't be reached by the other processes of this host ({error.strerror}): if the name is "
                "in use, a process of the same job still runs here: end it",
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def release(self, status: int, *, wait_s: float = _MEET_S) -> int:
        """Ends the followers with ``status``. Returns the number of those that did not come in time."""
        deadline = time.monotonic() + wait_s
        for released in range(self._followers):
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                follower, _ = self._socket.accept()
            except TimeoutError:
                return self._followers - released
            with follower, contextlib.suppress(OSError):  # it has ended already
                follower.sendall(bytes([status]))
        return 0


def follow(gathering: str, *, wait_s: float = _MEET_S) -> int:
    """Waits for the end of local rank 0, and returns its status; 1 if it was killed or has not come in time."""
    deadline = time.monotonic() + wait_s
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as leader:
            try:
                leader.connect(_address(gathering))
                return next(iter(leader.recv(1)), _ENDED_WITHOUT_STATUS)
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    return _ENDED_WITHOUT_STATUS
            except OSError:
                return _ENDED_WITHOUT_STATUS
        time.sleep(_RETRY_S)


def _address(gathering: str) -> str:
    """A name in the kernel (it begins with a zero byte) for this user."""
    return f"\0flexmarl-{os.geteuid()}-{xxhash.xxh3_128_hexdigest(gathering.encode())}"
