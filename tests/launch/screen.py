"""A terminal for tests, and all that is shown on it."""

import os
import pty
import threading

from ..patience import PATIENCE_S


class Screen:
    """A terminal that a run is shown on, and all that it has shown."""

    def __init__(self) -> None:
        self._controller, self.terminal = pty.openpty()
        self._shown = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._controller, 4096):
                self._shown += data
        except OSError:  # EIO: no process has the terminal open any more
            pass

    def press(self, keys: bytes) -> None:
        os.write(self._controller, keys)

    @property
    def text(self) -> str:
        return self._shown.decode(errors="replace")

    def close(self) -> None:
        self._reader.join(PATIENCE_S)
        os.close(self._controller)
