"""``flexmarl top`` as a process on a terminal, beside a run whose engines and trainer are simulated."""

import os
import signal
import termios
from pathlib import Path

import pytest

from flexmarl.launch.cli.main import main

from ..conftest import SIMULATED, Launched, Launcher, wait_until
from ..screen import Screen


def test_other_folders_and_other_outputs_are_refused(
    launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", str(tmp_path / "none")]) == 2
    assert "none is not a run directory" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("recipe: x\n")
    assert main(["top", str(tmp_path)]) == 2
    assert f"top needs a terminal; `flexmarl status {tmp_path}`" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("leave", ["q", "ctrl-C", "SIGTERM"])
def test_a_running_run_is_shown_and_the_terminal_is_as_it_was(
    launcher: Launcher, tmp_path: Path, leave: str
) -> None:
    hold = tmp_path / "hold"
    hold.write_text("2")
    run = launcher.train(f"held-{leave}", *SIMULATED, f"data.hold={hold}")
    run.wait_for_step(1)
    screen = Screen()
    before = termios.tcgetattr(screen.terminal)
    top = Launched(run.directory, "top", str(run.directory), terminal=screen.terminal)
    try:
        shown = ("solver", "Running for", "rollout-0: ")
        wait_until(lambda: all(words in screen.text for words in shown), f"{shown} on the screen")
        if leave == "SIGTERM":
            os.kill(next(iter(top._processes())).pid, signal.SIGTERM)
        else:
            screen.press(b"q" if leave == "q" else b"\x03")
        assert top.wait() == 0
        assert termios.tcgetattr(screen.terminal) == before
        wait_until(lambda: "\x1b[?1049l" in screen.text, "the terminal's screen as it was before")
        assert "Traceback" not in screen.text
    finally:
        top.close()
        os.close(screen.terminal)
        screen.close()
    hold.unlink()
    assert run.wait() == 0
