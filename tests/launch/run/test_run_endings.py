"""The end of a run in words."""

from pathlib import Path

import pytest

from flexmarl.actors.errors import ConfigError, RecipeError
from flexmarl.actors.messages import RunResult
from flexmarl.core.errors import ActorDead, ActorFailed
from flexmarl.launch.errors import Interrupted
from flexmarl.launch.run.run_endings import failure_text, learning_text, run_summary

RUN = Path("runs/first")
CHECKPOINT = RUN / "checkpoints" / "step_000002"
EVALUATIONS = {
    0: {"accuracy": 0.1, "reward/a": 0.0},
    20: {"accuracy": 0.9, "reward/a": 1.0},
    9: {"accuracy": 0.5, "reward/a": 0.5},
}


class TestLearned:
    def test_only_a_declared_evaluation_is_said_to_be_held_out(self) -> None:
        assert learning_text(EVALUATIONS, 0, True) == (
            "On problems that training never used, accuracy rose from 10.0% to 90.0%."
        )
        assert (
            learning_text(EVALUATIONS, 0, False) == "In the evaluations, accuracy rose from 10.0% to 90.0%."
        )

    def test_after_a_resume_the_whole_run_is_compared_and_said_to_be(self) -> None:
        words = learning_text(EVALUATIONS, 9, False)
        assert words == "In the evaluations, accuracy rose from 10.0% to 90.0% since the run's beginning."

    def test_the_first_evaluation_may_be_a_later_one(self) -> None:
        late = {step: EVALUATIONS[step] for step in (9, 20)}
        assert "rose from 50.0% to 90.0%" in learning_text(late, 0, False)
        assert learning_text({20: EVALUATIONS[20]}, 0, False) == "In the evaluations, accuracy is 90.0%."
        assert learning_text({}, 0, True) == ""

    def test_rewards_stand_in_for_missing_metrics(self) -> None:
        rewards = {step: {"reward/a": metrics["reward/a"]} for step, metrics in EVALUATIONS.items()}
        assert "reward/a rose from 0.000 to 1.000" in learning_text(rewards, 0, False)


def closing(result: RunResult, first: int = 0) -> str:
    report = RUN / "report.html"
    return run_summary(result, first=first, folder=RUN, report=report, wall_s=7.25, held_out=False)


def test_a_complete_run() -> None:
    words = closing(RunResult(20, False, EVALUATIONS, str(CHECKPOINT)), first=9)
    head, *files = words.splitlines()
    assert head.startswith("Trained 11 steps after step 9 in 7.25 s. In the evaluations, accuracy rose")
    assert [line.split()[0] for line in files] == ["report", "metrics", "checkpoints"]


def test_a_stopped_run_can_be_continued_from_its_checkpoint_alone() -> None:
    continued = f"Stopped after step 2. Continue with: flexmarl train --resume {RUN}"
    assert closing(RunResult(2, True, {}, str(CHECKPOINT))).startswith(continued)
    assert closing(RunResult(0, True, {}, "")).startswith(
        "Stopped after step 0, before the first checkpoint.\n"
    )


def failed(kind: str, message: str, raised_in: str = "trainer") -> ActorFailed:
    return ActorFailed("orchestrator", message, "frames", kind=kind, raised_in=raised_in)


class TestFailures:
    @pytest.mark.parametrize(
        ("error", "head"),
        [
            (
                ActorDead("trainer", "process 7 killed by signal 9"),
                "actor trainer died: process 7 killed by signal 9",
            ),
            (failed("OSError", "no route to host"), "actor trainer failed: OSError: no route to host"),
            (failed("RecipeError", "workflow.py: no reward"), "workflow.py: no reward"),
            (failed("RecipeError", "workflow.py: RecipeError: inner"), "workflow.py: RecipeError: inner"),
            (ConfigError("x.y=1: no"), "x.y=1: no"),
        ],
    )
    def test_name_the_cause_once(self, error: BaseException, head: str) -> None:
        assert failure_text(error, RUN, CHECKPOINT).splitlines()[0] == f"The run failed: {head}"

    def test_resume_is_offered_if_it_helps(self) -> None:
        lost = ActorDead("trainer", "process 7 killed by signal 9")
        resume = f"flexmarl train --resume {RUN}"
        assert f"continue with    {resume}" in failure_text(lost, RUN, CHECKPOINT)
        assert f"start again with {resume}" in failure_text(lost, RUN, None)
        assert f"start again with {resume}" in failure_text(Interrupted("stopped by SIGINT"), RUN, None)
        assert f"continue with    {resume}" in failure_text(failed("OSError", "no route"), RUN, CHECKPOINT)
        for repeated in (
            RecipeError("r"),
            failed("RecipeError", "r"),
            failed("UnsupportedModel", "m"),
            ConfigError("c"),
        ):
            assert "--resume" not in failure_text(repeated, RUN, CHECKPOINT), repeated
        assert "--resume" not in failure_text(failed("TypeError", "a defect"), RUN, None)

    def test_the_newest_checkpoint_is_named_also_if_the_run_would_fail_again(self) -> None:
        for error in (RecipeError("r"), Interrupted("stopped by SIGINT"), ActorDead("trainer", "lost")):
            assert f"\n  last checkpoint  {CHECKPOINT}" in failure_text(error, RUN, CHECKPOINT)
            assert "last checkpoint" not in failure_text(error, RUN, None)

    def test_details_come_first_and_the_cause_once(self) -> None:
        words = failure_text(
            ActorDead("trainer", "exit status 1\nThe last lines of its log:\nlast"), RUN, None
        )
        assert words.splitlines()[:4] == [
            "The last lines of its log:",
            "last",
            "",
            "The run failed: actor trainer died: exit status 1",
        ]

    def test_a_stop_is_no_failure(self) -> None:
        assert failure_text(Interrupted("stopped by SIGINT"), RUN, None).startswith(
            "The run was stopped by SIGINT\n"
        )


def test_the_command_that_continues_a_run_can_be_copied_also_from_a_folder_with_a_space() -> None:
    folder = Path("my runs/first")
    stopped = RunResult(2, True, {}, str(CHECKPOINT))
    words = run_summary(stopped, first=0, folder=folder, report=folder, wall_s=1.0, held_out=False)
    assert "flexmarl train --resume 'my runs/first'\n" in words
    assert "--resume 'my runs/first'" in failure_text(Interrupted("stopped"), folder, CHECKPOINT)
