"""A standard output that survives a closed pipe and a full disk."""

import os
from typing import Any, TextIO


class LossyOutput:
    """A text stream that discards its text after its reader has closed it or its disk is full.

    ``flexmarl train | head`` closes the pipe and a log-out closes the terminal. A run keeps its results in files, so
    neither ends it. After the first error the stream's descriptor points to /dev/null.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes ``text``, or discards it. Returns the number of its characters; raises no OSError."""
        try:
            return self._stream.write(text)
        except OSError:
            self._redirect_to_null()
            return len(text)

    def flush(self) -> None:
        """Passes buffered text to the descriptor, or discards it. Raises no OSError."""
        try:
            self._stream.flush()
        except OSError:
            self._redirect_to_null()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _redirect_to_null(self) -> None:
        # Discarding here is not enough: Python flushes the stream at the end of the process, which would fail with
        # status 120.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
