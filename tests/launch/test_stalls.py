"""Runs that stand still, each in another way: the cause is named, and the first ctrl-C ends the run."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import TINY, Launched, Launcher, wait_until

STALLS = Path(__file__).parent / "recipes" / "stalls"
MODEL = {
    "tokenizer": str(TINY / "tokenizer"),
    "config": {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 14,
        "tie_word_embeddings": False, "max_position_embeddings": 64,
    },
}  # fmt: skip
REAL = (f"agent_defaults.model={json.dumps(MODEL)}", "engine={name: embedded}", "trainer={name: torch}")
STOPPED = r"{} \(process \d+, stopped by a signal: `kill -CONT \d+` continues it\) does not answer"
TRAJECTORY_LIMIT = r"rollout\.trajectory_timeout_s=1800 ends it"


def nothing(run: Launched) -> None:
    """The recipe stands still by itself."""


def stop(actor: str) -> Callable[[Launched], None]:
    def trouble(run: Launched) -> None:
        run.wait_for_step(2)
        run.actors()[actor].suspend()

    return trouble


def stop_fork_server(run: Launched) -> None:
    """A rollout worker is killed, and the process that would fork its next life is stopped."""
    run.wait_for_step(2)
    worker = run.actors()["rollout-0"]
    parent = worker.parent()
    assert parent is not None
    parent.suspend()
    worker.kill()


@dataclass(frozen=True)
class Stall:
    """``settings``: of the run. ``cause``: a pattern of the line that names it. ``trouble``: from outside."""

    settings: tuple[str, ...]
    cause: str
    trouble: Callable[[Launched], None] = nothing
    checkpoint: bool = True


SILENT_SERVER = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
accepted = []
while True:
    accepted.append(server.accept())
"""

STALLED = {
    "one trajectory": Stall(
        ("data.hang=one",),
        r"rollout-0: 1 trajectory \(3:q2_\d\) at workflow.py:\d+, in _wait_for_ever: await asyncio.Event\(\).wait\(\), "
        rf"for .*; {TRAJECTORY_LIMIT}",
    ),
    "all trajectories, behind a gather": Stall(
        ("data.hang=all",),
        r"rollout-0: 4 trajectories \(3:q2_0, 3:q2_1, 3:q2_2, ...\) at workflow.py:\d+, in _wait_for_ever: ",
    ),
    "a lock that is never released": Stall(
        ("data.hang=lock",), r"rollout-0: 3 trajectories .* at .*, in _stand_still: await _lock.acquire\(\)"
    ),
    "in_process": Stall(
        ("data.hang=process",),
        r"rollout-0: 4 trajectories .* in _stand_still: await in_process\(_compute_for_ever",
    ),
    "a loop that is blocked": Stall(
        ("data.hang=blocked", "supervision.missed_heartbeats=100"),
        r"rollout-0 \(process \d+\) does not answer; the workflow blocks its event loop: workflow.py:\d+, in "
        r"_compute_for_ever: time.sleep",
    ),
    "train_query": Stall(
        ("data.hang=train_query",),
        r"orchestrator: train_query of workflow.py, at workflow.py:\d+, in _compute_for_ever: time.sleep\(3600.0\), "
        r"for .*; training.data_timeout_s=600 ends it",
    ),
    "eval_queries": Stall(
        ("data.hang=eval_queries",),
        r"orchestrator: eval_queries of workflow.py, at workflow.py",
        checkpoint=False,
    ),
    "evaluation": Stall(
        ("data.hang=evaluation",),
        r"rollout-0: 1 trajectory \(eval:e0_0\) at workflow.py:\d+, in _wait",
        checkpoint=False,
    ),
    "setup": Stall(
        ("data.hang=setup",),
        r"rollout-0: setup\(\) of the recipe, at workflow.py:\d+, in _wait_for_ever: .*; "
        r"rollout.setup_timeout_s=600 ends it",
        checkpoint=False,
    ),
    "setup blocks": Stall(
        ("data.hang=setup blocks",), r"rollout-0 \(process \d+\) does not answer", checkpoint=False
    ),
    "supervised batches": Stall(
        ("data.hang=sft", "agent_defaults.sft.batches=1", *REAL),
        r"trainer: supervised batches 0 to 0 of solver, which computes at workflow.py:\d+, in _compute_for_ever: "
        r"time.sleep\(3600.0\), for .*; training.compute_timeout_s=3600 ends it",
        checkpoint=False,
    ),
    "an engine": Stall(
        ("engine.token_s=1000",),
        r"solver-0: a turn of solver from the engine simulated \(4 times\), for .*; rollout.turn_timeout_s ends it",
        checkpoint=False,
    ),
    "a trainer": Stall(
        ("trainer.micro_batch_s=1000",),
        r"trainer: a micro-batch of solver, 4 samples, which computes, for .*; training.compute_timeout_s=3600",
        checkpoint=False,
    ),
    "a slot": Stall(
        ("trainer.micro_batch_s=1000", "pool={name: shared, slots: 1}"),
        r"slot-0: a micro-batch of solver, 4 samples, which computes, for .*; training.compute_timeout_s=3600",
        checkpoint=False,
    ),
    "the only instance is stopped": Stall((), STOPPED.format("solver-0"), stop("solver-0")),
    "the trainer is stopped": Stall((), STOPPED.format("trainer"), stop("trainer")),
    "the orchestrator is stopped": Stall((), STOPPED.format("orchestrator"), stop("orchestrator")),
    "the store is stopped": Stall((), STOPPED.format("store"), stop("store")),
    "the fork server is stopped": Stall(
        (),
        r"a process for rollout-0, from the process that forks actors \(process \d+, stopped",
        stop_fork_server,
    ),
    "a judge outside the run": Stall(
        ("agents.solver.columns.reward={type: float, required: true, written_by: external}",),
        r"rollout-0: 4 trajectories .* for rewards that a program outside the run gives: does the judge run\?",
        checkpoint=False,
    ),
    "columns from outside": Stall(
        ("agents.solver.columns.grade={type: float, required: true, written_by: external}",),
        r"store: grade of samples of solver, from a program outside the run, for .*; "
        r"agents.solver.columns.grade.timeout_s=600 ends it",
        checkpoint=False,
    ),
    "a full store": Stall(
        (
            "store={memory_bytes: 65536, disk_bytes: 0, segment_bytes: 32768}",
            "agent_defaults.sampling.max_new_tokens=500",
            "engine={name: simulated, median_tokens: 400}",
            "training.queries_per_step=16",
            "trainer.micro_batch_s=1000",
        ),
        r"store: room for samples: .*; store.room_timeout_s=1800 ends it",
        checkpoint=False,
    ),
}


@dataclass(frozen=True)
class Deadline:
    """``settings``: of the run. ``error``: a pattern of its end. ``trouble``: from outside."""

    settings: tuple[str, ...]
    error: str
    trouble: Callable[[Launched], None] = nothing


DEADLINES = {
    "a blocked loop": Deadline(
        ("data.hang=blocked", "supervision={heartbeat_s: 1, missed_heartbeats: 6}"),
        r"workflow.py blocks the event loop of its rollout worker until the worker is lost, 3 times one after the "
        r"other; the last time in workflow.py:\d+, in _compute_for_ever: ",
    ),
    "train_query": Deadline(
        ("data.hang=train_query", "training.data_timeout_s=1"),
        r"train_query has not returned within training.data_timeout_s=1, at workflow.py:\d+, in _compute_for_ever",
    ),
    "eval_queries": Deadline(
        ("data.hang=eval_queries", "training.data_timeout_s=1"),
        r"eval_queries has not returned within training.data_timeout_s=1, at workflow.py:\d+, in _compute_for_ever",
    ),
    "setup": Deadline(
        ("data.hang=setup", "rollout.setup_timeout_s=1"), r"setup failed: TimeoutError: not done within 1 s"
    ),
    "a trainer": Deadline(
        ("data.hang=sft", "agent_defaults.sft.batches=1", "training.compute_timeout_s=1", *REAL),
        r"supervised batches 0 to 0 of solver has not ended within training.compute_timeout_s=1",
    ),
    "a slot": Deadline(
        ("trainer.micro_batch_s=1000", "training.compute_timeout_s=1", "pool={name: shared, slots: 1}"),
        r"a micro-batch of solver, 4 samples has not ended within training.compute_timeout_s=1",
    ),
    "a full store": Deadline(
        (*STALLED["a full store"].settings, "store.room_timeout_s=1"),
        r"no sample came or was taken \(store.room_timeout_s=1\): the steps under way do not fit",
    ),
    "an orchestrator that is stopped": Deadline(
        ("supervision.silence_s=10",),
        r"orchestrator died: its process runs, but has not answered for",
        stop("orchestrator"),
    ),
}


@pytest.mark.parametrize("name", DEADLINES)
def test_it_ends_by_its_deadline(launcher: Launcher, name: str) -> None:
    deadline = DEADLINES[name]
    run = launcher.train(f"ends-{re.sub(r'[^a-z]', '-', name)}", *deadline.settings, recipe=STALLS)
    deadline.trouble(run)
    assert run.wait() == 1, run.text
    assert re.search(deadline.error, run.text), run.text
    run.assert_nothing_is_left()


def test_an_endpoint_that_accepts_and_is_silent_is_named(launcher: Launcher) -> None:
    command = [sys.executable, "-c", SILENT_SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
        endpoint = {"train": False, "engine": {"name": "openai", "base_url": url, "model": "m"}}
        policies = {"solver": {}, "helper": endpoint}
        agents = {name: {"policy": name} for name in policies}
        run = launcher.train(
            "silent-endpoint",
            f"agents={json.dumps(agents)}",
            f"policies={json.dumps(policies)}",
            recipe=STALLS,
        )
        cause = rf"helper-0: a turn of helper from the endpoint {url} \(5 attempts of engine.request_timeout_s=120\)"
        try:
            wait_until(lambda: any(re.search(cause, line) for line in causes(run)), run.text)
            run.signal(signal.SIGINT)
            assert run.wait() == 130, run.text
            assert "last checkpoint" in run.text
            run.assert_nothing_is_left()
        finally:
            server.kill()


def test_a_recipe_whose_import_hangs_is_named_and_ended_by_ctrl_c(launcher: Launcher, tmp_path: Path) -> None:
    shutil.copytree(STALLS, recipe := tmp_path / "recipe")
    workflow = recipe / "workflow.py"
    workflow.write_text(f"{workflow.read_text()}\n_compute_for_ever()\n")
    # The tests' own process may ignore ctrl-C, which its children inherit.
    prelude = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    run = launcher.train("import", recipe=recipe, prelude=prelude)
    run.wait_for_output("of at most 1800 at workflow.py:")
    assert "in _compute_for_ever: time.sleep(3600.0)" in run.text
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.text


@pytest.mark.parametrize(
    ("hang", "problem"),
    [
        ("teardown", r"teardown failed: TimeoutError: not done within 1 s"),
        (
            "teardown blocks",
            r"it did not end when it was asked to, and was killed; it computed at workflow.py:",
        ),
    ],
)
def test_a_teardown_that_hangs_is_named_and_costs_no_result(
    launcher: Launcher, hang: str, problem: str
) -> None:
    run = launcher.train(hang.replace(" ", "-"), f"data.hang={hang}", "training.steps=2", recipe=STALLS)
    assert run.wait() == 0, run.text
    assert re.search(rf"rollout-0 has not ended in good order: .*{problem}", run.text), run.text
    assert "Trained 2 steps" in run.text
    run.assert_nothing_is_left()


def test_the_only_instance_is_restarted_if_it_is_silent_in_a_standstill(launcher: Launcher) -> None:
    run = launcher.train("restarted-instance", "supervision.silence_s=10", recipe=STALLS)
    stop("solver-0")(run)
    run.wait_for_output("the run continues after")
    assert "solver-0 is restarted: actor solver-0 died: its process runs, but has not answered" in run.text
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.text
    run.assert_nothing_is_left()


def causes(run: Launched) -> list[str]:
    return [cause for event in run.events if event["event"] == "run_stalled" for cause in event["causes"]]


@pytest.mark.parametrize("name", STALLED)
def test_its_cause_is_named_and_the_first_ctrl_c_ends_it(launcher: Launcher, name: str) -> None:
    stall = STALLED[name]
    run = launcher.train(re.sub(r"\W", "-", name), *stall.settings, recipe=STALLS)
    stall.trouble(run)
    wait_until(
        lambda: run.process.poll() is not None or any(re.search(stall.cause, cause) for cause in causes(run)),
        f"{stall.cause}\n{run.text}",
    )
    assert any(re.search(stall.cause, cause) for cause in causes(run)), run.text
    assert re.search(stall.cause, run.text), "the console has it too"
    assert "waits for" in status_of(run)
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.text
    assert ("last checkpoint" in run.text) == stall.checkpoint, run.text
    run.assert_nothing_is_left()


def status_of(run: Launched) -> str:
    command = [sys.executable, "-P", "-m", "flexmarl.launch.cli", "status", str(run.directory)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
