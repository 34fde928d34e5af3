"""Runs whose workflow or recipe is at fault."""

import re
import shutil
from pathlib import Path

import pytest

from .conftest import ONE_AGENT, SIMULATED, SIMULATED_POLICIES, TINY, Launcher
from .in_process import RunsHere


class TestFaults:
    def test_single_trajectories_are_dropped_and_counted(self, runs_here: RunsHere) -> None:
        run = runs_here.train(
            "faults",
            *ONE_AGENT,
            "training={steps: 4, queries_per_step: 1, trajectories_per_query: 4, micro_batch: 4}",
            "data.faults=[raise, nan, long prompt, hang]",
            "rollout.trajectory_timeout_s=4",
        )
        assert run.status == 0 and not run.problems, run.text
        assert [line["failed_trajectories"] for line in run.metrics] == [1, 1, 1, 1]
        assert [line["samples/solver"] for line in run.metrics] == [3, 3, 3, 3]
        failures = [event for event in run.events if event["event"] == "trajectory_failed"]
        assert [failure["step"] for failure in failures] == [1, 2, 3, 4]
        raised, not_a_number, too_long, timed_out = (failure["error"] for failure in failures)
        assert raised == "ValueError: no luck with q000"
        assert "in _misbehave" in failures[0]["traceback"]
        assert "reward of 'solver' is nan" in not_a_number
        assert "100 prompt tokens + 3 new ones exceed" in too_long and "64" in too_long
        assert timed_out == "not done within rollout.trajectory_timeout_s=4"
        assert "warning: trajectory 1:q000_" in run.text

    @pytest.mark.parametrize(
        ("fault", "faulty", "message"),
        [
            ("raise", 2, r"step 1: 2 of 4 trajectories failed \(rollout.max_failed_share allows 25%\)"),
            ("unknown agent", 1, r"asks for agent 'judge', which the config lacks; it has: solver"),
            ("return None", 1, r"the workflow returned NoneType, not Rewards"),
        ],
    )
    def test_what_no_run_can_succeed_with_ends_it(
        self, runs_here: RunsHere, fault: str, faulty: int, message: str
    ) -> None:
        training = "training={steps: 4, queries_per_step: 1, trajectories_per_query: 4, micro_batch: 4}"
        run = runs_here.train(
            f"fatal-{fault.replace(' ', '-')}",
            *SIMULATED,
            training,
            f"data.faults=[{fault}]",
            f"data.faulty={faulty}",
        )
        assert "before training" in run.text
        assert run.status == 1
        assert re.search(message, run.text)
        if fault == "raise":
            assert "ValueError: no luck with q000" in run.text and "in _misbehave" in run.text
        head, files = run.text.splitlines()[-2:]
        assert re.match(rf"The run failed: .*{message}", head) and "actor" not in head
        assert files == f"  events and logs  {run.directory}", "the same run would fail again"

    @pytest.mark.parametrize(
        "query", [r"Query('q\ud83d', '12', drawn.data)", r"Query('q\ud83d', '12', {'note': '\ud83d'})"]
    )
    def test_half_of_a_character_in_a_query_is_named_with_its_position(
        self, runs_here: RunsHere, tmp_path: Path, query: str
    ) -> None:
        shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
        with (tmp_path / "workflow.py").open("a") as code:
            code.write(
                "\n_whole = train_query\n"
                "def train_query(position, seed, **data):\n"
                "    drawn = _whole(position, seed, **data)\n"
                f"    return {query} if position == 3 else drawn\n"
            )
        run = runs_here.train(f"half-{tmp_path.name}", *SIMULATED_POLICIES, recipe=tmp_path)
        assert run.status == 1, run.text
        assert r"workflow.py: train_query(3, seed) gives the query 'q\ud83d', which can't be sent" in run.text
        assert "half of a surrogate pair" in run.events[-1]["error"] and not run.problems

    @pytest.mark.parametrize(
        ("code", "message"),
        [
            ("def workflow(:", "SyntaxError"),
            ("raise RuntimeError('out of luck')", "RuntimeError: out of luck"),
            ("async def workflow(query, agents): ...", "defines no function 'train_query'"),
        ],
    )
    def test_a_recipe_that_does_not_load_is_named(
        self, launcher: Launcher, tmp_path: Path, code: str, message: str
    ) -> None:
        (tmp_path / "config.yaml").write_text((launcher.recipe / "config.yaml").read_text())
        (tmp_path / "tokenizer").symlink_to(launcher.recipe / "tokenizer")
        (tmp_path / "workflow.py").write_text(code)
        run = launcher.train(f"broken-{tmp_path.name}", *SIMULATED_POLICIES, recipe=tmp_path, prelude="")
        assert run.wait() == 2
        assert message in run.text
        assert f"{tmp_path}, checked before the start:" in run.text and not run.directory.exists()
