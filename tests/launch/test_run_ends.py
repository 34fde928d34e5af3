"""Ends of real runs: deaths of actors, signals, and the terminal that they leave."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexmarl.core.errors import ActorDead, ActorFailed

from .conftest import ONE_AGENT, SIMULATED, SIMULATED_POLICIES, Launched, Launcher, json_lines, wait_until
from .in_process import end_of, run_in_loop, wait_for_step
from .screen import Screen

SMALL = (
    *SIMULATED,
    "training.queries_per_step=1",
    "training.micro_batch=4",
    "checkpoint.every=1",
)


@pytest.fixture
def held(launcher: Launcher, tmp_path: Path) -> Iterator[Launched]:
    """A run with one agent that has saved its first step and now waits in its second."""
    hold = tmp_path / "hold"
    hold.write_text("1")
    run = launcher.train(f"held-{tmp_path.name}", *SMALL, f"data.hold={hold}")
    run.wait_for_output("checkpoints/step_000001")  # later than the step's line in the metrics
    yield run
    run.close()


class TestDeath:
    @pytest.mark.parametrize("actor", ["store", "orchestrator"])
    def test_of_an_actor_ends_the_run_and_is_named(self, held: Launched, actor: str) -> None:
        held.actors()[actor].kill()
        assert held.wait() == 1
        last = held.text.splitlines()[-4:]
        assert re.fullmatch(rf"The run failed: actor {actor} died: process \d+ killed by signal 9", last[0])
        assert last[2].startswith(f"  last checkpoint  {held.directory}")
        assert last[3].endswith(f"flexmarl train --resume {held.directory}")
        assert held.events[-1]["event"] == "run_ended" and actor in held.events[-1]["error"]
        held.assert_nothing_is_left()

    @pytest.mark.parametrize("actor", ["trainer", "router"])
    async def test_of_an_actor_in_a_task_ends_the_run_and_is_named(self, tmp_path: Path, actor: str) -> None:
        hold = tmp_path / "hold"
        hold.write_text("1")
        died = pytest.raises((ActorDead, ActorFailed), match=f"actor {actor} died")
        async with run_in_loop(tmp_path, "held", *SMALL, f"data.hold={hold}") as run:
            await wait_for_step(run, 1)
            end_of(actor)
            with died:
                await run.wait()
        last = json_lines(run.directory.events)[-1]
        assert last["event"] == "run_ended" and actor in last["error"]

    def test_of_an_instance_costs_its_turns_a_retry_at_the_next_one(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        """The only one of its policy, three times: the run takes no restart of its own. It can't end before the last
        time."""
        hold = tmp_path / "hold"
        hold.write_text("5")
        slow = (
            "engine={name: simulated, token_s: 0.05, median_tokens: 40}",
            "agent_defaults.sampling.max_new_tokens=20",
        )
        run = launcher.train(f"immortal-{tmp_path.name}", *SMALL, *slow, f"data.hold={hold}")
        back = "solver-0 serves solver: it was started again"
        for step in (1, 2, 3):
            run.wait_for_output(f"checkpoints/step_00000{step}")
            wait_until(lambda: "solver-0" in run.actors(), "the instance")  # it may be starting again
            run.actors()["solver-0"].kill()
            wait_until(lambda times=step: run.text.count(back) == times, f"{back}, {step} times")  # type: ignore[misc]
        hold.unlink()
        assert run.wait() == 0, run.text
        assert run.text.count("solver-0 may be lost") == 3
        assert run.text.count(back) == 3
        news = [event["state"] for event in run.events if event["event"] == "instance_changed"]
        assert news[:3] == ["suspected", "gone", "serving"]
        assert sum(line["retried_turns"] for line in run.metrics) > 0
        assert not any(line["failed_trajectories"] for line in run.metrics)
        run.assert_nothing_is_left()

    def test_is_survived_as_often_as_was_asked_for(self, launcher: Launcher, tmp_path: Path) -> None:
        """Once without a new checkpoint in between; a new checkpoint resets the count."""
        hold = tmp_path / "hold"
        hold.write_text("1")
        name = f"phoenix-{tmp_path.name}"
        run = launcher.train(name, *SMALL, f"data.hold={hold}", "--restarts", "1")
        for step in (1, 2):
            run.wait_for_output(f"checkpoints/step_00000{step}")
            run.actors()["trainer"].kill()
            run.wait_for_output(f"continuing after step {step}")
            hold.write_text(str(step + 1))
        run.wait_for_output("checkpoints/step_000003")
        run.actors()["trainer"].kill()
        run.wait_for_output("continuing after step 3")
        wait_until(lambda: len(run.actors()) == 6, "six processes")
        run.actors()["store"].kill()
        assert run.wait() == 1
        assert [line["step"] for line in run.metrics] == [1, 2, 3]
        assert [event["event"] for event in run.events].count("run_resumed") == 3
        run.assert_nothing_is_left()


class TestSignals:
    def test_a_second_one_stops_at_once_even_where_an_actor_is_stuck(self, held: Launched) -> None:
        held.actors()["trainer"].suspend()
        held.signal(signal.SIGINT)
        held.wait_for_output("once more stops at once")
        held.signal(signal.SIGTERM)
        assert held.wait() == 130
        assert "The run was stopped by SIGTERM" in held.text
        held.assert_nothing_is_left()  # logs may have the death of an actor that was killed a moment before another

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_one_before_the_actors_are_ready_stops_at_once(
        self, launcher: Launcher, number: signal.Signals, tmp_path: Path
    ) -> None:
        run = launcher.train(f"early-{number.name}", *ONE_AGENT)
        run.wait_for_output("starting actors")
        wait_until(lambda: len(run.actors()) == 6, "six processes")
        run.signal(number)
        assert run.wait() == 130
        assert f"The run was stopped by {number.name}" in run.text
        run.assert_nothing_is_left()

    def test_where_the_launcher_is_killed_actors_end_though_they_are_busy_starting(
        self, launcher: Launcher
    ) -> None:
        run = launcher.train("orphans", *ONE_AGENT)
        run.wait_for_output("starting actors")
        wait_until(lambda: len(run.actors()) == 6, "six processes")
        run.signal(signal.SIGKILL)
        run.wait()
        run.assert_nothing_is_left()

    def test_one_during_sft_stops_before_the_first_step(self, launcher: Launcher) -> None:
        sft = ("agent_defaults.sft={batches: 1000, batch_size: 2}", "data.warm_up_pause_s=0.05")
        run = launcher.train("warm", *ONE_AGENT, *SIMULATED_POLICIES, *sft)
        run.wait_for_output("supervised fine-tuning of solver")
        run.signal(signal.SIGINT)
        assert run.wait() == 130
        assert "Stopped after step 0, before the first checkpoint" in run.text
        assert run.metrics == [] and list((run.directory / "checkpoints").iterdir()) == []
        run.assert_nothing_is_left()
        run.assert_logs_are_clean()


def test_on_a_terminal_the_display_is_put_away(launcher: Launcher, tmp_path: Path) -> None:
    """A conversation in three turns besides: its tokens are those of the turns before, or trajectories fail."""
    hold = tmp_path / "hold"
    hold.write_text("2")
    screen = Screen()
    run = launcher.train(
        "terminal",
        *ONE_AGENT,
        *SIMULATED_POLICIES,
        "data.shape=talk",
        f"data.hold={hold}",
        terminal=screen.terminal,
    )
    os.close(screen.terminal)
    run.wait_for_step(1)
    screen.press(b"\x03")
    wait_until(lambda: "once more stops at once" in screen.text, "the answer to ctrl-C")
    hold.unlink()
    assert run.wait() == 130
    screen.close()
    assert "\x1b[?25l" in screen.text
    assert screen.text.rindex("\x1b[?25h") > screen.text.rindex("\x1b[?25l"), "the cursor is shown again"
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.text).splitlines()
    result = next(
        n for n, line in enumerate(plain) if line.startswith("Stopped after step 2. Continue with:")
    )
    assert all("step 2" not in line for line in plain[result + 1 :]), "it stands at the end"
    assert [line["failed_trajectories"] for line in run.metrics] == [0, 0]
    run.assert_nothing_is_left()
