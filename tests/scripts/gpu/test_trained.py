"""Runs of the battery that end well, end badly, or leave something behind."""

import time
from collections.abc import Iterator

import pytest

from scripts.gpu.checks import Card, Check, holds
from scripts.gpu.trained import Late, TrainRun, WrongEnd, check_end, checks_of_part, closing

from ...launch.conftest import SIMULATED, TINY
from ...patience import PATIENCE_S

SHORT = (*SIMULATED, "training={steps: 2, queries_per_step: 2, trajectories_per_query: 2, micro_batch: 4}")


def deadline() -> float:
    return time.monotonic() + PATIENCE_S


def test_a_run_that_ends_well_has_figures_and_leaves_nothing(card: Card) -> None:
    run = TrainRun(card, "well", TINY, *SHORT)
    with closing([run]):
        run.wait_for_step(1, deadline())
        checks = {check.name: check for check in check_end(run, deadline())}
        assert checks["exit status"].passed and checks["sockets and shared memory left"].passed
        assert checks["seconds"].value and run.seconds_until_ready() > 0
        assert [line["step"] for line in run.metrics] == [1, 2]
        assert len(run.ready_times("solver-0")) == 1
        (run.runtime / "forgotten").write_text("")
        (failure,) = [check for check in check_end(run, deadline()) if check.passed is False]
        assert failure.value == "forgotten"
    assert not run.runtime.exists()


def test_a_wrong_end_is_named_with_the_last_line(card: Card) -> None:
    run = TrainRun(card, "wrong", TINY, "no.such=1")
    with closing([run]):
        with pytest.raises(WrongEnd, match=r"exit status 2: .*no"):
            list(check_end(run, deadline()))
        with pytest.raises(Late, match="has ended with status 2 before step 1"):
            run.wait_for_step(1, deadline())


def test_a_run_that_is_late_is_killed_at_the_end(card: Card) -> None:
    run = TrainRun(card, "late", TINY, *SHORT, "training.steps=1000000")
    with closing([run]), pytest.raises(Late, match="late has not ended"):
        run.wait_end(time.monotonic())
    assert run.process.returncode == -9


def test_an_error_of_a_part_is_a_failed_check_and_hides_no_check_before_it() -> None:
    def checks() -> Iterator[Check]:
        yield holds("first", 1, "1", True)
        raise KeyError("second")

    assert [(check.name, check.passed) for check in checks_of_part("part", checks)] == [
        ("part: first", True),
        ("part: ended", False),
    ]
