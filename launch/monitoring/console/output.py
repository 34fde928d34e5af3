"""The standard output of ``flexmarl train``, in one of its four forms."""

import sys
import time
from typing import Literal, TextIO, cast

from ...config.run_config import RunConfig
from .display import Display
from .json_display import JsonDisplay, write_json
from .lossy_output import LossyOutput
from .progress import Progress
from .progress_views import print_line
from .terminal import Terminal

Form = Literal["quiet", "normal", "verbose", "json"]


class Output:
    """Shows a run and its result.

    - ``normal``: a live table on a terminal, else plain lines; then the result.
    - ``quiet``: warnings and the result.
    - ``verbose``: plain lines, one for every step, and failed trajectories with their tracebacks; then the result.
    - ``json``: one object per line, for programs, and nothing else.
    """

    def __init__(self, form: Form, stream: TextIO | None) -> None:
        """``stream``: None if there is no standard output (``flexmarl train >&-``)."""
        self._form = form
        self._stream = cast(TextIO, LossyOutput(stream)) if stream else None
        self._console = Terminal(file=self._stream, soft_wrap=True)

    @classmethod
    def standard(cls, form: Form) -> "Output":
        """The output of a command, on this process's standard output, also if that is closed."""
        return cls(form, sys.stdout)

    def display(self, config: RunConfig, run_name: str, first_step: int) -> Display:
        """``first_step``: steps that finished before a resume."""
        if self._form == "json":
            return JsonDisplay(self._console.file)  # type: ignore[arg-type]  # rich's IO[str] is a text stream
        return Progress(
            self._console,
            run_name=run_name,
            mode=config.mode,
            total_steps=config.training.steps,
            agents={name: agent.policy for name, agent in config.agents.items()},
            first_step=first_step,
            detail=self._form,
        )

    def note(self, text: str) -> None:
        """Prints a remark before or between runs."""
        if self._form != "quiet":
            self.answer(text)

    def answer(self, text: str) -> None:
        """Prints the outcome of a command that starts no run."""
        if self._form == "json":
            record = {"time": round(time.time(), 3), "event": "note", "text": text}
            write_json(self._console.file, record)  # type: ignore[arg-type]  # rich's IO[str] is a text stream
        else:
            print_line(self._console, text)

    def result(self, text: str) -> None:
        """Prints the end of a run, in words; under ``json`` the event ``run_ended`` holds it."""
        if self._form != "json":
            print_line(self._console, text)
