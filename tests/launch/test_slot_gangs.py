"""Runs whose policies have two ranks, on slot workers that share them."""

from pathlib import Path

import pytest

from .conftest import REPRODUCIBLE, Launched, Launcher, wait_until
from .in_process import Finished

GANGS = ("trainer={name: torch, ranks: 2}", "pool={name: shared, slots: 2}")


def losses(run: Launched | Finished) -> list[float]:
    return [line[f"loss/{policy}"] for line in run.metrics for policy in ("solver", "checker")]


def test_two_ranks_learn_what_one_learns_also_after_a_kill(
    launcher: Launcher, undisturbed: Finished, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    hold.write_text("1")  # the second step waits for the kill
    gangs = launcher.train("gangs", *REPRODUCIBLE, "checkpoint.every=0", *GANGS, f"data.hold={hold}")
    gangs.wait_for_step(1)
    gangs.actors()["slot-1"].kill()
    hold.unlink()
    assert gangs.wait() == 0, gangs.text
    assert losses(gangs) == pytest.approx(losses(undisturbed), abs=1e-5)
    assert [line["step"] for line in gangs.metrics] == [line["step"] for line in undisturbed.metrics]
    suspended = [event for event in gangs.events if event["event"] == "policy_suspended"]
    assert suspended
    # The ranks are in the order of the slots, and a slot that was lost comes last.
    assert {frozenset(event["slots"].split(", ")) for event in suspended} == {frozenset({"slot-0", "slot-1"})}
    wait_until(lambda: any(event["event"] == "slot_lost" for event in gangs.events), "the loss")
    gangs.assert_nothing_is_left()
