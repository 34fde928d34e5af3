import io
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flexmarl.actors.names import AgentName, PolicyName, Step
from flexmarl.actors.run_events import Evaluated, RunStalled
from flexmarl.launch.monitoring.console.progress import Progress

from .stage import CHECKER, SORTER, Stage, metrics, policy


def test_plain_lines_have_a_stable_form() -> None:
    stage = Stage(terminal=False)
    with stage.progress:
        stage.step(120)
        stage.now_s += 3
    assert stage.lines == [
        "run sorting mode=strict steps=400 agents=sorter,checker",
        "step 120/400 | smoothed: reward sorter=0.500 checker=0.250, tokens/s=14.4k, overlap=0.012s",
        "run sorting ended step=120/400 wall=3 s",
    ]


@pytest.mark.parametrize(
    ("total_steps", "text"), [(400, "before training: accuracy 0.250"), (0, "evaluation: accuracy 0.250")]
)
def test_an_evaluation_without_training_is_before_nothing(total_steps: int, text: str) -> None:
    stage = Stage(terminal=False, total_steps=total_steps)
    with stage.progress:
        stage.progress.event(Evaluated(Step(0), 3.0, {"accuracy": 0.25}))
    assert text in stage.lines


def test_plain_step_lines_come_at_intervals_and_for_the_last_step() -> None:
    stage = Stage(terminal=False)
    with stage.progress:
        for step in range(1, 401):
            stage.now_s += 1 / 16
            stage.step(step)
    shown = [line.split()[1] for line in stage.lines if line.startswith("step")]
    assert shown == ["1/400", "161/400", "321/400", "400/400"]


def test_a_resumed_run_has_no_step_line_before_its_first_step() -> None:
    stage = Stage(terminal=False, first_step=5)
    with stage.progress:
        stage.progress.note("checkpoint saved")
        stage.step(6)
    shown = [line for line in stage.lines if line.startswith("step")]
    assert [line.split()[1] for line in shown] == ["6/400"]


@given(st.lists(st.sampled_from(["step", "phase", "other phase", "note", "warn"]), max_size=300))
def test_plain_lines_stay_below_about_one_a_second(calls: list[str]) -> None:
    stage = Stage(terminal=False)
    progress = stage.progress
    what: dict[str, Callable[[int], None]] = {
        "step": stage.step,
        "phase": lambda index: progress.phase("warming up", index, 300),
        "other phase": lambda index: progress.phase("evaluating"),
        "note": lambda index: progress.note(f"note {index}"),
        "warn": lambda index: progress.warn("again"),
    }
    with progress:
        for index, call in enumerate(calls):
            stage.now_s += 0.05
            what[call](index)
        assert len(stage.lines) <= 5 + 0.05 * len(calls) + 1


def test_messages_held_back_are_shown_in_the_end_and_counted() -> None:
    stage = Stage(terminal=False)
    with stage.progress:
        for index in range(500):
            stage.progress.warn(f"trajectory {index} failed" if index < 100 else "disk is slow")
    assert "warning: trajectory 0 failed" in stage.lines
    assert "warning: trajectory 53 failed" in stage.lines
    held = re.search(r"warning: (\d+) more messages came too fast", stage.text)
    assert held is not None
    shown = sum(line.startswith("warning: trajectory") for line in stage.lines)
    assert shown + int(held[1]) == 500
    stage = Stage(terminal=False)
    with stage.progress:
        for _ in range(500):
            stage.progress.warn("disk is slow")
    assert "warning: disk is slow (496 times)" in stage.lines


def test_messages_held_back_are_shown_when_time_has_passed() -> None:
    stage = Stage(terminal=False)
    with stage.progress:
        for index in range(7):
            stage.progress.note(f"note {index}")
        assert stage.lines[-1] == "note 3"
        stage.now_s += 2
        stage.progress.tick()
        assert stage.lines[-2:] == ["note 4", "note 5"]


def test_an_answer_waits_for_no_rate() -> None:
    stage = Stage(terminal=False)
    with stage.progress:
        for index in range(20):
            stage.progress.note(f"note {index}")
        stage.progress.warn("stopping", at_once=True)
        assert stage.lines[-2:] == ["note 19", "warning: stopping"]


def test_events_have_lines_of_their_own() -> None:
    stage = Stage(terminal=False)
    with stage.progress:
        stage.progress.phase("warming up sorter", 30, 60)
        stage.progress.note("checkpoint saved at step 200")
        stage.now_s += 5
        stage.progress.event(Evaluated(Step(200), 1.5, {"accuracy": 0.934, "reward/sorter": 0.5}))
        stage.step(
            200, evaluation={"accuracy": 0.934, "reward/sorter": 0.5}, figures={"failed_trajectories": 2}
        )
    assert "phase warming up sorter 30/60" in stage.lines
    assert "checkpoint saved at step 200" in stage.lines
    assert "after step 200: accuracy 0.934, reward/sorter 0.500" in stage.lines
    assert any(line.startswith("step 200/400") and line.endswith("failed=2") for line in stage.lines)


@pytest.mark.parametrize("terminal", [False, True])
def test_text_from_elsewhere_has_no_effect(terminal: bool) -> None:
    stage = Stage(terminal=terminal, agents=("[red]a[/red]",))
    with stage.progress:
        stage.progress.warn("boom [bold]x[/] :smile:\nnext\x1b[2Jline\r\x07")
        stage.progress.phase("[/nonsense]")
        stage.step(1)
    assert "warning: boom [bold]x[/] :smile: next\\x1b[2Jline\\x0d\\x07" in stage.text
    assert "\x1b[2J" not in stage.out.getvalue() and "\x07" not in stage.out.getvalue()
    assert "[red]a[/red]" in stage.text and "[/nonsense]" in stage.text


@pytest.mark.parametrize("terminal", [False, True])
def test_missing_and_wrong_values_are_tolerated(terminal: bool) -> None:
    stage = Stage(terminal=terminal)
    with stage.progress:
        stage.progress.step(metrics(2))
        nan = float("nan")
        stage.progress.step(metrics(3, by_agent={SORTER: {"reward": nan}}, tokens_per_s=nan))
        by_agent = {SORTER: {}, AgentName("other"): {"reward": 1.0}}
        stage.progress.step(metrics(4, by_agent=by_agent, by_policy={PolicyName("other"): policy(1)}))
    assert "step 4/400" in stage.text
    assert "nan" not in stage.text and "other" not in stage.text


def test_the_reward_of_turns_is_shown_where_turns_are_rewarded() -> None:
    stage = Stage(terminal=False)
    with stage.progress:
        for step in (1, 2):
            stage.progress.step(metrics(step, by_agent={SORTER: {"reward": 0.0, "turn_reward": 0.166}}))
    assert "reward sorter=0.166" in stage.text and "sorter=0.000" not in stage.text


def test_reward_is_smoothed() -> None:
    stage = Stage(terminal=False, agents=("a",))
    with stage.progress:
        for step in range(1, 101):
            stage.progress.step(metrics(step, by_agent={AgentName("a"): {"reward": step % 2}}))
    value = re.findall(r"a=(\d\.\d+)", stage.text)[-1]
    assert 0.4 < float(value) < 0.6


def test_terminal_shows_table_trend_and_time_left() -> None:
    stage = Stage(terminal=True)
    with stage.progress:
        for step in range(1, 101):
            stage.now_s += 0.5
            of_sorter = policy(step, samples=128, loss=-0.5)
            stage.step(
                step,
                by_agent={SORTER: {"reward": step / 100}, CHECKER: {"reward": 0.25}},
                by_policy={PolicyName("sorter"): of_sorter},
            )
        stage.progress.phase("evaluating", 250, 500)
    last = stage.text[stage.text.rindex("sorting · strict") :]
    assert "evaluating 250/500" in last
    assert "step 100/400" in last and "25%" in last and "2 min 30 s left" in last
    assert "14.4k tokens/s" in last and "overlap 0.012 s/step" in last
    row = next(line for line in last.splitlines() if line.startswith("sorter"))
    assert "▁" in row and "█" in row and "128" in row and "-0.5000" in row and " 100 " in row
    assert last.splitlines()[-1] == "run sorting ended step=100/400 wall=50 s"


def test_agents_of_one_policy_show_its_figures_once() -> None:
    agents = ("sorter", "critic", "checker")
    stage = Stage(terminal=True, agents=agents, policy_of={"sorter": "shared", "checker": "shared"})
    with stage.progress:
        stage.step(
            7,
            by_agent={SORTER: {"reward": 0.5}, CHECKER: {"reward": 0.25}},
            by_policy={
                PolicyName("shared"): policy(7, samples=128, loss=0.125, max_staleness=3),
                PolicyName("critic"): policy(6, samples=64, loss=0.75),
            },
        )
    rows = [line.split() for line in stage.lines[-5:-1]]
    assert rows[0] == [
        "agent",
        "reward",
        "trend",
        "policy",
        "version",
        "loss",
        "grad",
        "norm",
        "samples",
        "staleness",
    ]
    assert rows[1] == ["sorter", "0.500", "▁", "shared", "7", "0.1250", "-", "128", "3"]
    assert rows[2] == ["checker", "0.250", "▁", "shared"]
    assert rows[3] == ["critic", "-", "critic", "6", "0.7500", "-", "64", "0"]


def test_terminal_is_redrawn_at_most_about_8_times_a_second() -> None:
    stage = Stage(terminal=True)
    with stage.progress:
        for step in range(2000):
            stage.now_s += 0.005
            stage.progress.phase("generating" if step % 2 else "training")
            stage.step(step)
        drawn = stage.text.count("sorting · strict")
    assert 70 <= drawn <= 86


def test_a_new_phase_is_drawn_at_once() -> None:
    """It may block for minutes without another call."""
    stage = Stage(terminal=True)
    with stage.progress:
        for step in range(50):
            stage.step(step)
        stage.progress.phase("saving checkpoint")
        assert "saving checkpoint" in stage.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("terminal", [False, True])
def test_an_exception_leaves_the_terminal_clean(error: type[BaseException], terminal: bool) -> None:
    stage = Stage(terminal=terminal)
    with pytest.raises(error), stage.progress:
        stage.step(7)
        raise error
    out = stage.out.getvalue()
    assert out.count("\x1b[?25l") == out.count("\x1b[?25h") == int(terminal)  # cursor hidden, shown
    assert stage.lines[-1] == f"run sorting stopped by {error.__name__} step=7/400 wall=0 s"
    stage.console.print("after")
    assert stage.out.getvalue().endswith("after\n") and stage.out.getvalue().count("after") == 1


@pytest.mark.parametrize("width", [20, 39, 45, 55, 65, 75, 80, 200])
def test_terminal_rows_never_wrap(width: int) -> None:
    stage = Stage(terminal=True, width=width, agents=("a-rather-long-agent-name-indeed", "b"))
    with stage.progress:
        for step in range(1, 30):
            stage.now_s += 1
            of_b = policy(step, loss=12345.6, samples=10**6)
            by_agent = {AgentName("b"): {"reward": 0.1}}
            stage.progress.step(metrics(step, by_agent=by_agent, by_policy={PolicyName("b"): of_b}))
        shown = stage.text
    last = shown[shown.rindex("sorting") :].splitlines()
    assert len(last) == 7
    assert all(len(line) <= width for line in last)


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    environ = {"TERM": "xterm-256color", "NO_COLOR": "1"}
    console = Console(file=out, force_terminal=True, width=100, height=40, _environ=environ)
    agents = {AgentName("a"): PolicyName("a")}
    with Progress(console, run_name="r", mode="sync", total_steps=2, agents=agents) as progress:
        progress.phase("starting")
        progress.warn("careful")
        progress.step(metrics(1, by_agent={AgentName("a"): {"reward": 0.1}}))
    assert not re.search(r"\x1b\[[0-9;]*\b(3[0-9]|38|9[0-7])\b[0-9;]*m", out.getvalue())


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=120))
def test_any_rewards_can_be_drawn(rewards: list[float]) -> None:
    stage = Stage(terminal=True, agents=("a",))
    with stage.progress:
        for step, reward in enumerate(rewards):
            stage.now_s += 1
            stage.progress.step(metrics(step, by_agent={AgentName("a"): {"reward": reward}}))
    assert "run sorting ended" in stage.text


def test_a_standstill_is_shown_at_once_though_other_warnings_are_held_back() -> None:
    causes = (f"store: room for samples, for {n} s" for n in range(31, 40))
    stalled = RunStalled(Step(3), 31.0, tuple(causes))
    stage = Stage(terminal=False)
    with stage.progress:
        for index in range(100):
            stage.progress.warn(f"trajectory {index} failed")
        stage.progress.event(stalled)
        shown = stage.lines[-1 - len(stalled.causes) :]  # those held back come first
    assert shown[0] == "warning: nothing has ended for 31 s, step 4 waits for:"
    assert [line.strip() for line in shown[1:]] == [*stalled.causes]
