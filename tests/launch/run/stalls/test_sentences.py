"""The causes of a standstill as lines for people."""

from collections.abc import Sequence

from flexmarl.core.waits import ProcessWaits, Wait
from flexmarl.launch.run.stalls.sentences import sentences

SILENCE = "a fifth of supervision.silence_s=300"


def lines(
    reports: dict[str, dict[str, Sequence[Wait]] | None], blocked: dict[str, str] | None = None
) -> list[str]:
    processes = {
        name: ProcessWaits(f"process {number}", waits)
        for number, (name, waits) in enumerate(reports.items(), 1)
    }
    return [*sentences(processes, blocked or {}, SILENCE)]


def test_a_cause_is_named_with_its_actor_its_time_and_its_limit_and_consequences_are_not() -> None:
    assert lines(
        {
            "launcher": {"orchestrator": [Wait("2 groups (q1, q2) at rollout-0", 40.0, actor="rollout-0")]},
            "rollout-0": {
                "rollout-0": [Wait("1 trajectory (3:q1_0) at workflow.py:3", 35.0, "x=600 ends it")]
            },
        }
    ) == ["rollout-0: 1 trajectory (3:q1_0) at workflow.py:3, for 35 s; x=600 ends it"]


def test_the_longest_wait_is_the_first() -> None:
    found = lines({"a": {"a": [Wait("short", 31.0), Wait("long", 95.0)]}, "b": {"b": [Wait("middle", 60.0)]}})
    assert [line.partition(",")[0] for line in found] == ["a: long", "b: middle", "a: short"]


def test_without_a_cause_the_consequences_are_shown() -> None:
    assert lines(
        {"trainer": {"trainer": [Wait("4 samples of solver", 31.0, actor="store")]}, "store": {}}
    ) == ["trainer: 4 samples of solver, for 31 s"]


def test_processes_that_do_not_answer_come_first_with_the_line_that_blocks_them() -> None:
    reports: dict[str, dict[str, Sequence[Wait]] | None] = {
        "orchestrator": {"orchestrator": [Wait("2 groups at rollout-0", 40.0, actor="rollout-0")]},
        "store": {"store": [Wait("room", 40.0)]},
        "rollout-0": None,
        "trainer": None,
    }
    blocked = {"rollout-0": "workflow.py:3, in workflow: time.sleep(9)", "trainer": ""}
    assert lines(reports, blocked) == [
        "rollout-0 (process 3) does not answer; the workflow blocks its event loop: workflow.py:3, in workflow: "
        f"time.sleep(9); {SILENCE} ends it",
        f"trainer (process 4) does not answer; {SILENCE} ends it",
        "store: room, for 40 s",
    ]


def test_a_silent_process_is_cause_enough_for_consequences_to_be_left_out() -> None:
    waits = [Wait("new weights of solver", 40.0, actor="solver-0")]
    assert len(lines({"orchestrator": {"orchestrator": waits}, "solver-0": None})) == 1


def test_eight_lines_are_shown_at_most() -> None:
    found = lines({"a": {"a": [Wait(f"wait {n}", 100.0 - n) for n in range(11)]}})
    assert len(found) == 9 and found[-1] == "and 3 more"
    assert len(lines({"a": {"a": [Wait(f"wait {n}", 100.0 - n) for n in range(8)]}})) == 8


def test_no_wait_at_all_is_said() -> None:
    assert lines({"a": {}}) == ["no actor names a wait; `flexmarl logs RUN` may have more"]
