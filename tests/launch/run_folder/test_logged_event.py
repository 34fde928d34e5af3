"""Lines of events, as readers have them."""

from flexmarl.actors.run_events import CheckpointSaved
from flexmarl.launch.run_folder.logged_event import LoggedEvent


def test_a_line_has_its_time_its_name_and_its_event() -> None:
    line = {"time": 5, "event": "checkpoint_saved", "step": 3, "folder": "x"}
    logged = LoggedEvent.of(line)
    assert (logged.time, logged.name, logged.line) == (5.0, "checkpoint_saved", line)
    assert logged.event == CheckpointSaved(step=3, folder="x")  # type: ignore[arg-type]


def test_a_line_of_another_version_is_kept_without_an_event() -> None:
    logged = LoggedEvent.of({"time": "noon", "event": "checkpoint_lost"})
    assert (logged.time, logged.name, logged.event) == (None, "checkpoint_lost", None)
    assert LoggedEvent.of({}).name == ""
