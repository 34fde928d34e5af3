"""Runs that stand still: each ends, or continues, by a deadline of its own, and says why."""

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from .conftest import Launched, Launcher
from .stall_ways import REAL, STALLED, STALLS, nothing, stop


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
    # Longer than the start of a trainer, which has the same limit, on a busy machine.
    "a trainer": Deadline(
        ("data.hang=sft", "agent_defaults.sft.batches=1", "training.compute_timeout_s=6", *REAL),
        r"supervised batches 0 to 0 of solver has not ended within training.compute_timeout_s=6",
    ),
    "a slot": Deadline(
        ("trainer.micro_batch_s=1000", "training.compute_timeout_s=6", "pool={name: shared, slots: 1}"),
        r"a micro-batch of solver, 4 samples has not ended within training.compute_timeout_s=6",
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
    run.wait_for_output("solver-0 is restarted: actor solver-0 died: its process runs, but has not answered")
    run.wait_for_output("the run continues after")
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.text
    run.assert_nothing_is_left()
