"""Writes event files of TensorBoard: ``tensorboard --logdir runs/<name>/tensorboard``, or the folder of all runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .sink import Figures, Sink, SinkRun

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

_FLUSH_S = 5


class TensorboardSink(Sink):
    """A resumed run marks the steps that it repeats as void: TensorBoard shows the new ones."""

    appends_only = False

    def __init__(self, folder: Path | None) -> None:
        """``folder``: of the run's files, by default ``tensorboard`` in the run's folder."""
        self._folder = folder
        self._writer: EventFileWriter | None = None

    def open(self, run: SinkRun, series: str) -> tuple[str, str]:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.folder / "tensorboard" if self._folder is None else self._folder / run.name
        self._writer = EventFileWriter(str(folder), flush_secs=_FLUSH_S)
        if run.step:
            self._writer.add_event(Event(step=run.step + 1, session_log=SessionLog(status=SessionLog.START)))
        return "", f"tensorboard --logdir {folder}"

    def write(self, figures: Figures) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values: Any = [Summary.Value(tag=tag, simple_value=value) for tag, value in figures.figures.items()]
        assert self._writer is not None, "it was opened"
        self._writer.add_event(
            Event(wall_time=figures.time_s, step=figures.step, summary=Summary(value=values))
        )

    def close(self, failed: bool) -> None:
        assert self._writer is not None, "it was opened"
        self._writer.close()
