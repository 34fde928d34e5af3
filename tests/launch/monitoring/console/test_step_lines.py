"""Lines of a run without a terminal: none is starved, and no word is cut."""

import pytest

from flexmarl.actors.names import AgentName, PolicyName, Step
from flexmarl.actors.run_events import Evaluated, RunEvent, SftDone, TrajectoryFailed

from .stage import Stage, metrics, policy


def test_step_lines_come_at_a_steady_rate_whatever_phases_and_messages_do() -> None:
    """Every step is followed by the phases of an evaluation, and by messages beyond the rate."""
    stage = Stage(terminal=False)
    with stage.progress:
        for step in range(1, 121):
            stage.progress.phase(f"evaluating {step} queries")
            stage.now_s += 0.5
            for number in range(3):
                stage.progress.note(f"checkpoint {step}.{number} saved")
            stage.step(step)
            stage.progress.phase("saving a checkpoint")
            stage.now_s += 0.5
    shown = [int(line.split()[1].split("/")[0]) for line in stage.lines if line.startswith("step")]
    assert shown == [1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120]


def test_step_lines_show_the_pace_and_the_time_left() -> None:
    stage = Stage(terminal=False)
    with stage.progress:
        for step in range(1, 201):
            stage.now_s += 0.5
            stage.step(step)
    assert stage.lines[-2].startswith("step 200/400 | 2 steps/s, 100 s left | smoothed: reward sorter=0.500")
    stage = Stage(terminal=False)
    with stage.progress:
        for step in (1, 2, 3):
            stage.now_s += 150
            stage.step(step)
    assert "step 3/400 | 2 min 30 s/step, 16 h 32 min left | " in stage.text


def test_a_long_step_gives_a_sign_of_life_each_minute() -> None:
    stage = Stage(terminal=False)
    with stage.progress:
        stage.step(7)
        for _ in range(150):
            stage.now_s += 1
            stage.progress.tick()
    waiting = [line for line in stage.lines if "under way" in line]
    assert waiting == [
        "step 8/400 is under way (60 s)",
        "step 8/400 is under way (2 min 00 s)",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_failed_trajectory_is_shown_three_times_at_most(terminal: bool) -> None:
    stage = Stage(terminal=terminal)
    with stage.progress:
        for number in range(5):
            stage.progress.event(TrajectoryFailed(Step(1), f"1:q_{number}", "ValueError: no", "frames"))
    assert stage.text.count("was dropped: ValueError: no") == 3 and "frames" not in stage.text


def test_quiet_shows_warnings_alone() -> None:
    for terminal in (False, True):
        stage = Stage(terminal=terminal, detail="quiet")
        with stage.progress:
            stage.progress.phase("evaluating")
            stage.progress.note("checkpoint saved")
            stage.progress.event(Evaluated(Step(1), 1.0, {"accuracy": 1.0}))
            stage.step(1)
            stage.progress.warn("the disk is full")
        assert stage.lines == ["warning: the disk is full"]


def test_verbose_shows_every_step_and_every_failure_with_its_frames() -> None:
    for terminal in (False, True):
        stage = Stage(terminal=terminal, detail="verbose")
        with stage.progress:
            for step in range(1, 41):
                stage.step(step)
                failed = TrajectoryFailed(Step(step), f"{step}:q_0", "ValueError: no", "a frame\nits line\n")
                stage.progress.event(failed)
        assert sum(line.startswith("step ") for line in stage.lines) == 40
        assert stage.lines.count("  its line") == 40


@pytest.mark.parametrize("agents", [("sorter", "checker"), ("a-rather-long-agent-name-indeed", "b")])
def test_at_80_columns_a_terminal_cuts_no_word(agents: tuple[str, ...]) -> None:
    phase = "starting actors (not yet: trainer, sorter-0, sorter-1, checker-0, checker-1, rollout)"
    warning = "trajectory 12:q000123_7 was dropped: not done within rollout.trajectory_timeout_s=600, twice"
    stage = Stage(terminal=True, width=80, agents=agents)
    with stage.progress:
        for step in range(1, 30):
            stage.now_s += 1
            by_agent = {AgentName(name): {"reward": -12.3456} for name in agents}
            by_policy = {PolicyName(name): policy(step, loss=1.5, samples=12345) for name in agents}
            stage.progress.step(
                metrics(step, by_agent=by_agent, by_policy=by_policy, figures={"failed_trajectories": 1000})
            )
        stage.progress.warn(warning)
        stage.progress.phase(phase)
        shown = stage.text
    assert all(len(line) <= 80 for line in shown.splitlines())
    known = {
        *phase.split(),
        *warning.split(),
        *agents,
        "…",
        "reward",
        "trend",
        "version",
        "loss",
        "grad",
        "norm",
    }
    last = shown[shown.rindex("sorting · strict") :]
    header, _, numbers, smoothing, heads, *_ = last.splitlines()
    assert set(header.split()) <= {"sorting", "·", "strict"} | known
    assert numbers.rstrip() == "14.4k tokens/s · 0.07 s/step · 29000 failed"
    assert smoothing.split()[-4:] == ["over", "about", "20", "steps"]
    assert {*heads.split()} <= {"agent", "samples", "staleness"} | known
    assert set(" ".join(shown.split()).partition("warning: ")[2].split()[:9]) <= known


@pytest.mark.parametrize(
    "ending", [Evaluated(Step(0), 1.0, {"accuracy": 0.5}), SftDone(PolicyName("a"), 3, 0.5)]
)
def test_a_phase_ends_with_its_event(ending: RunEvent) -> None:
    """The first step follows: the evaluation before it does not contain it."""
    stage = Stage(terminal=False)
    with stage.progress:
        stage.progress.phase("evaluating 64 queries")
        stage.progress.event(ending)
        for _ in range(61):
            stage.now_s += 1
            stage.progress.tick()
    assert [line for line in stage.lines if "evaluating" in line] == ["phase evaluating 64 queries"]
    assert "step 1/400 is under way (60 s)" in stage.lines


def test_step_lines_show_the_shares_of_a_shared_pools_swaps_and_waits() -> None:
    stage = Stage(terminal=False)
    times = {
        "pool_computing_s": 6.0, "pool_idle_s": 1.0, "pool_swapping_s": 1.0, "pool_waiting_s": 2.0,
        "pool_suspended_s": 0.0,
    }  # fmt: skip
    with stage.progress:
        stage.step(1, by_policy={PolicyName("sorter"): policy(1, **times)})
    assert "pool swapping 12%, waiting 20%" in stage.text
    stage = Stage(terminal=False)
    with stage.progress:
        stage.step(1)
    assert "pool" not in stage.text, "it is static"
