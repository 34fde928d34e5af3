"""Trajectories that programs play through the gateway of their worker."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import flexmarl

from .conftest import Launched, Launcher, wait_until
from .in_process import RunsHere
from .stall_ways import causes

RECIPE = Path(__file__).parent / "recipes" / "program"
FAULTS = {
    "killed": r"^ProgramFailed: the program .* was killed by SIGKILL after",
    "hangs": r"was killed: it took longer than 0\.5 s, without the time of its models' answers",
    "daemon": r"ended with status 1 after .*; its last lines:\nit leaves a daemon$",
    "dead key": r"(?s)ended with status 1.*HTTP Error 401: Unauthorized$",
    "mid-stream": r"(?s)ended with status 1 after .*it has closed its stream$",
    "unknown model": r"(?s)ended with status 1.*HTTP Error 404: Not Found$",
    "too many turns": r"(?s)the gateway's last refusal: agent solver: no further turn, the trajectory has reached "
    r"agents\.solver\.sampling\.trajectory_turns=20",
}  # fmt: skip


def test_a_program_plays_each_trajectory(runs_here: RunsHere) -> None:
    run = runs_here.train("program", recipe=RECIPE)
    assert run.status == 0, run.text
    for step in run.metrics:
        assert (step["workflow/begun"], step["workflow/merged"], step["workflow/turns"]) == (2.0, 2.0, 4.0)
        assert (step["turns/solver"], step["turns/checker"]) == (12, 4)
        assert (step["reward/solver"], step["turn_reward/checker"]) == (1.0, 0.5)
        assert step["gateway_merged"] == 8
        assert "gateway_branched" not in step


def test_a_conversation_of_a_program_keeps_its_tokens(runs_here: RunsHere) -> None:
    run = runs_here.train("tokens", "training.steps=1", recipe=RECIPE)
    assert run.status == 0, run.text
    with flexmarl.Samples(run.directory) as samples:
        trajectories = list(samples.trajectories(evaluation=False))
    assert len(trajectories) == 4
    for trajectory in trajectories:
        first, second, third = [turn for turn in trajectory.turns if turn.agent == "solver"]
        for before, after in ((first, second), (second, third)):
            assert after.prompt[0] == before.number, "it continues that turn's tokens"
            assert after.prompt_tokens > before.prompt_tokens + len(before.tokens)


def test_a_fault_costs_its_trajectory_and_is_named(runs_here: RunsHere) -> None:
    names = ["none", *FAULTS]
    run = runs_here.train(
        "faults",
        f"data={{faults: {json.dumps(['', *FAULTS])}}}",
        f"training={{steps: 1, queries_per_step: {len(names)}, trajectories_per_query: 2, micro_batch: 2}}",
        "rollout.max_failed_share=1",
        "agents.solver.sampling.trajectory_turns=20",
        recipe=RECIPE,
    )
    assert run.status == 0, run.text
    (step,) = run.metrics
    assert step["failed_trajectories"] == 2 * len(FAULTS)
    with flexmarl.Samples(run.directory) as samples:
        trajectories = {
            trajectory.query.id: trajectory for trajectory in samples.trajectories(evaluation=False)
        }
    failures = {name: trajectories[f"q{number}"].failure for number, name in enumerate(names)}
    assert not failures.pop("none")
    for name, failure in failures.items():
        assert re.search(FAULTS[name], failure), (name, failure)
    (program,) = trajectories["q1"].programs
    assert program.status == -signal.SIGKILL
    daemons = [child for child in psutil.Process().children(recursive=True) if is_program(child)]
    assert not daemons


def test_ten_requests_at_once_are_ten_turns(runs_here: RunsHere) -> None:
    run = runs_here.train("at-once", "data={faults: [at once]}", "training.steps=1", recipe=RECIPE)
    assert run.status == 0, run.text
    assert run.metrics[0]["turns/solver"] == 4 * (1 + 10 + 3)


def test_turns_that_are_not_trained_are_left_out_and_counted(runs_here: RunsHere) -> None:
    run = runs_here.train("main", "data={faults: [at once], train: main}", "training.steps=1", recipe=RECIPE)
    assert run.status == 0, run.text
    (step,) = run.metrics
    assert step["samples/solver"] == 4 * 3, "the longest conversation"
    assert step["gateway_masked"] == 4 * (1 + 10)
    assert step["samples/checker"] == 4


def test_a_program_is_in_the_conversation_that_people_read(runs_here: RunsHere) -> None:
    run = runs_here.train("read", "training.steps=1", recipe=RECIPE)
    command = [
        sys.executable,
        "-P",
        "-m",
        "flexmarl.launch.cli.main",
        "samples",
        str(run.directory),
        "--limit",
        "1",
    ]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert re.search(r"program .*program.py 'task 1 1'  status 0 · \d", shown), shown


def programs(run: Launched) -> list[psutil.Process]:
    return [process for process in run._processes() if is_program(process)]


def is_program(process: psutil.Process) -> bool:
    try:
        return "program.py" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # or one that has ended, and that its parent has not looked at
        return False


@pytest.fixture
def waiting(launcher: Launcher, request: pytest.FixtureRequest) -> Launched:
    """A run whose programs wait for nothing, with a worker of its own."""
    run = launcher.train(request.node.name, "data={faults: [waits]}", "supervision.stall_s=1", recipe=RECIPE)
    wait_until(lambda: programs(run) or run.process.poll() is not None, "programs have begun")
    assert run.process.poll() is None, run.text
    return run


def test_a_program_that_hangs_is_named_and_ctrl_c_ends_it(waiting: Launched) -> None:
    cause = (
        r"rollout-0: \d trajector.* in the program .*program.py 'task 1 0' waits, which asks for no turn, for .*; "
        r"rollout\.trajectory_timeout_s=1800 ends it"
    )
    wait_until(lambda: any(re.search(cause, found) for found in causes(waiting)), f"{cause}\n{waiting.text}")
    waiting.signal(signal.SIGINT)
    assert waiting.wait() == 130, waiting.text
    waiting.assert_nothing_is_left()


def test_programs_end_with_their_worker(waiting: Launched) -> None:
    before = programs(waiting)
    waiting.actors()["rollout-0"].kill()
    wait_until(lambda: not set(before) & set(programs(waiting)), "they end")
    waiting.signal(signal.SIGINT)
    waiting.wait()
    waiting.assert_nothing_is_left()
