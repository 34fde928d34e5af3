"""Programs in the trajectory that is played before the start: they are started, their mistakes are named, they end."""

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from flexmarl.launch.run.preflight.trial_findings import Trial

from ...conftest import wait_until
from .test_trial import play

pytestmark = pytest.mark.usefixtures("forgotten_recipes")

SECONDS = f"{1_000_000 + os.getpid()}"
"""The argument of the ``sleep`` that a program here leaves: no other process has it."""
PROGRAM = f'''
import json, os, subprocess, sys, time, urllib.request


def ask(model):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({{"model": model, "messages": [{{"role": "user", "content": "1 + 1?"}}]}}).encode(),
        {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}},
    )
    urllib.request.urlopen(request).read()


match sys.argv[1]:
    case "model":
        ask("gpt-5")
    case "status":
        sys.exit("no data here")
    case "late status":
        ask("solver")
        sys.exit("no data here")
    case "right" | "leaves":
        ask("solver")
    case "hangs":
        ask("solver")
if sys.argv[1] in ("leaves", "hangs"):
    subprocess.Popen(["sleep", "{SECONDS}"], start_new_session=True)
if sys.argv[1] == "hangs":
    time.sleep(1000)
open(os.environ["FLEXMARL_REWARDS_FILE"], "w").write('{{"agents": {{"solver": 1}}}}')
'''
WORKFLOW = """
from flexmarl.actors import open_gateway

async def workflow(query, agents):
    async with open_gateway(agents) as gateway:
        end = await gateway.run({command!r})
    return gateway.rewards(end)
"""


def play_program(folder: Path, way: str, settings: dict[str, Any] | None = None) -> Trial:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    commands = {"missing": ["no-such-program"], "elsewhere": [sys.executable, "tools/program.py"]}
    command = commands.get(way, [sys.executable, str(program), way])
    return play(folder, WORKFLOW.format(command=command), settings)


def sleepers() -> list[int]:
    pids = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline() == ["sleep", SECONDS] and process.status() != psutil.STATUS_ZOMBIE:
                pids.append(process.pid)
    return pids


@pytest.mark.parametrize("way", ["right", "leaves"])
def test_a_right_program_has_no_findings_and_leaves_nothing(tmp_path: Path, way: str) -> None:
    assert play_program(tmp_path, way) == Trial()
    assert not sleepers()


def test_a_model_that_there_is_not_refuses_the_run(tmp_path: Path) -> None:
    trial = play_program(tmp_path, "model")
    (problem,) = trial.problems
    assert trial.warnings == [] and "\n" not in problem
    assert problem.startswith("workflow.py:") and "checks.trajectory=false" in problem
    assert (
        "the gateway's last refusal: there is no model 'gpt-5'; there is: solver; its last line: " in problem
    )


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("status", "ended with status 1 after .*; its last line: no data here; the try runs in an empty temporary"),
        ("late status", "ended with status 1 after .*; its last line: no data here"),
        ("missing", "the program no-such-program ended with status 127 after .*: No such file or directory; the try"),
        ("elsewhere", "ended with status 2 after .*No such file or directory; the try runs in an empty temporary"),
        ("silent", r"the program .*program\.py silent asked no agent for a turn .*: it finds its models by OPENAI"),
    ],
)  # fmt: skip
def test_what_may_come_of_the_machine_is_a_warning_of_one_line(tmp_path: Path, way: str, words: str) -> None:
    trial = play_program(tmp_path, way)
    (warning,) = trial.warnings
    assert trial.problems == [] and "\n" not in warning
    assert re.search(words, warning), warning


def test_a_program_that_hangs_is_a_warning_with_its_line_and_is_ended(tmp_path: Path) -> None:
    trial = play_program(tmp_path, "hangs", {"checks": {"trajectory_timeout_s": 8.0}})
    (warning,) = trial.warnings
    assert not trial.problems and "checks.trajectory_timeout_s=8; it stood at workflow.py:" in warning
    assert "gateway.run" in warning
    wait_until(lambda: not sleepers(), "what it has left ends with it")
