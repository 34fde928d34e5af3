"""The progress of a simulation: its words, on a terminal and without one."""

import io
import queue
from pathlib import Path

import pytest

from flexmarl.launch.monitoring.console.terminal import Terminal
from flexmarl.launch.simulate.scenario import read_scenario
from flexmarl.launch.simulate.scenario_run import run_scenario
from flexmarl.launch.simulate.simulated_progress import SimulationProgress

SCENARIO = Path(__file__).parent / "scenario.yaml"
PATIENCE_S = 60.0


class Lines(io.StringIO):
    """Each text that is written can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = queue.SimpleQueue[str]()

    def write(self, text: str) -> int:
        self.texts.put(text)
        return super().write(text)


def test_the_words_have_the_step_the_virtual_time_and_the_real_one(tmp_path: Path) -> None:
    class Clock(SimulationProgress):
        """Notes its words at each step."""

        texts: list[str]

        def step(self, metrics: object) -> None:
            super().step(metrics)  # type: ignore[arg-type]  # a step's metrics
            now[0] += 3.0
            self.texts.append(self.text())

    now = [0.0]
    progress = Clock(Terminal(file=io.StringIO()), 2, clock=lambda: now[0])
    progress.texts = [progress.text()]
    run_scenario(read_scenario(SCENARIO, []), tmp_path / "run", display=progress)
    start, first, last = progress.texts
    assert start == "placing the actors of the simulation; 0 s"
    assert first.startswith("1 of 2 steps simulated, ") and first.endswith(
        " s of virtual time; 3 s, about 3 s more"
    )
    assert last.startswith("2 of 2 steps simulated, ") and last.endswith(" s of virtual time; 6 s")


def test_without_a_terminal_a_line_comes_again_and_again_until_the_end() -> None:
    lines = Lines()
    with SimulationProgress(Terminal(file=lines), 2, line_s=0.001):
        texts = [lines.texts.get(timeout=PATIENCE_S) for _ in range(2)]
    assert all(text.startswith("placing the actors of the simulation; ") for text in texts)
    written = lines.getvalue()
    assert written.endswith("\n") and "\x1b" not in written


def test_on_a_terminal_the_line_is_gone_at_the_end_and_the_cursor_is_back() -> None:
    screen = io.StringIO()
    with pytest.raises(KeyboardInterrupt), SimulationProgress(Terminal(file=screen, force_terminal=True), 2):
        raise KeyboardInterrupt
    shown = screen.getvalue()
    assert "placing the actors" in shown and shown.endswith("\x1b[1A\x1b[2K") and "\x1b[?25h" in shown


def test_the_files_of_a_run_are_the_same_without_it(tmp_path: Path) -> None:
    for name in ("with", "without"):
        display = SimulationProgress(Terminal(file=Lines()), 2, line_s=0.001) if name == "with" else None
        if display is None:
            run_scenario(read_scenario(SCENARIO, []), tmp_path / name)
        else:
            with display:
                run_scenario(read_scenario(SCENARIO, []), tmp_path / name, display=display)
    for file in ("metrics.jsonl", "events.jsonl"):
        first, second = ((tmp_path / name / file).read_text() for name in ("with", "without"))
        assert first == second.replace("/without", "/with")
