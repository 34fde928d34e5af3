"""Standard output that may go away while a run does not."""

import os
from typing import Any, TextIO


class LossyOutput:
    """A text stream that carries on into nothing once its reader has left or its disk is full.

    ``flexmarl train | head`` closes the pipe and logging out closes the terminal; a run keeps its results in files,
    so neither is a reason to end it. The stream's descriptor is led to /dev/null for good then.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._lead_to_nowhere()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._lead_to_nowhere()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lead_to_nowhere(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
