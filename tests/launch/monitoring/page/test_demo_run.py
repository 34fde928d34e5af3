"""The recorded run of ``flexmarl page --demo``."""

import re
import signal
import tarfile
from pathlib import Path

import httpx2
import pytest

from flexmarl.actors.spans import KINDS
from flexmarl.launch.cli.main import main
from flexmarl.launch.monitoring.page.demo_run import ARCHIVE, NAME, PACKAGE, unpacked_demo
from flexmarl.launch.monitoring.page.panels import PANELS
from flexmarl.launch.monitoring.page.recorded_run import RecordedRun
from flexmarl.launch.monitoring.timeline.stored_spans import StoredSpans
from flexmarl.launch.run_folder.run_directory import RunDirectory
from scripts.demo_run import FILES, MOST_BYTES

from ....patience import PATIENCE_S
from ...conftest import Launcher


def test_the_archive_is_small_and_has_the_files_alone_that_the_page_reads() -> None:
    assert ARCHIVE.stat().st_size < MOST_BYTES
    with tarfile.open(ARCHIVE) as archive:
        assert [member.name for member in archive] == [f"{NAME}/{name}" for name in FILES]
        assert all(member.isfile() and not member.uname and not member.mtime for member in archive)
        texts = [archive.extractfile(f"{NAME}/{name}") for name in FILES if name.endswith(("yaml", "jsonl"))]
        assert not [
            text for text in texts if text is None or re.search(rb"/(tmp|root|home|work)/", text.read())
        ]


def test_every_panel_has_something_to_show_and_nothing_is_left() -> None:
    with unpacked_demo() as folder:
        run = RecordedRun(folder)
        with run.reading():
            views = {panel.name: panel.view(run, {}) for panel in PANELS}
            assert run.state == "done" and run.last_step == 60
        assert "rose from" in views["now"]["headline"] and views["now"]["findings"]
        assert views["learning"]["charts"] and views["timeline"]["spans"]
        assert views["policies"]["stays"]["stays"], "two policies take turns on the slot"
        assert str(run.config["recipe"]).startswith(str(PACKAGE))
        [first, *_] = views["trajectories"]["rows"]
        shown = PANELS[2].view(run, {"of": first["name"], "tokens": "1"})
        assert not shown["turns"][0]["tokens"][0].startswith("<"), "texts, not numbers"
        run.close()
    assert not folder.exists()


def test_its_spans_have_every_kind_that_a_run_on_this_machine_writes() -> None:
    """Without those of an engine that can't tell the two parts of its work apart, and of instances that move."""
    with unpacked_demo() as folder:
        stored = StoredSpans(RunDirectory(folder).trace)
        assert stored.refresh() and not stored.dropped
        spans = stored.spans(range(stored.size))
    assert {span.kind for span in spans} == {*KINDS} - {"generate", "move"}


def test_the_command_serves_it_until_it_is_stopped(launcher: Launcher, tmp_path: Path) -> None:
    page = launcher._launch("demo", "page", "--demo")
    page.wait_for_output("http://")
    page.wait_for_output("/\n")
    address = page.text.strip()
    assert httpx2.get(f"{address}panels/now.json", timeout=PATIENCE_S).json()["step"] == 60
    page.signal(signal.SIGTERM)
    assert page.wait() == 0


@pytest.mark.parametrize("words", [[], ["--demo", "runs/first"]])
def test_runs_or_the_demo_are_needed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["page", *words]) == 2
    assert "the folders of runs, or --demo" in capsys.readouterr().err
