"""Whole runs: their files, and their continuation."""

import re
import shutil
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from flexmarl.launch.cli.main import main
from flexmarl.launch.monitoring.formatting import duration

from ..conftest import REPRODUCIBLE, SIMULATED_POLICIES, TINY, Launched, Launcher, wait_until
from ..in_process import Finished, RunsHere
from ..run_files import assert_bit_equal

ESCAPE = re.compile(r"\x1b")


class TestAWholeRun:
    def test_leaves_nothing_running_and_clean_logs(self, whole: Launched) -> None:
        whole.assert_nothing_is_left()
        whole.assert_logs_are_clean()

    def test_shows_plain_lines_and_ends_with_the_result(self, whole: Launched) -> None:
        assert not ESCAPE.search(whole.text)
        # On a busy machine the checks print lines before it.
        lines = [line for line in whole.text.splitlines() if not line.startswith("checking ")]
        assert lines[0] == "run whole mode=strict steps=6 agents=solver,checker"
        end = next(place for place, line in enumerate(lines) if line.startswith("Trained "))
        closing, reasons = lines[end : end + 4], lines[end + 4 :]
        assert re.fullmatch(
            r"Trained 6 steps in [\d.]+ s\. In the evaluations, accuracy (rose|fell|stayed) .* [\d.]+%.*",
            closing[0],
        )
        assert [line.split()[0] for line in closing[1:]] == ["report", "metrics", "checkpoints"]
        assert all(Path(line.split()[1]).exists() for line in closing[1:])
        assert not reasons or reasons[0] == "time and learning of the newest steps"

    def test_every_step_has_its_metrics(self, whole: Launched) -> None:
        assert [line["step"] for line in whole.metrics] == [1, 2, 3, 4, 5, 6]
        processes = ("launcher", "store", "trainer", "rollout-0", "orchestrator", "solver-0", "checker-0")
        for line in whole.metrics:
            agents = {
                f"{key}/{agent}"
                for key in ("reward", "loss", "samples", "lr")
                for agent in ("solver", "checker")
            }
            assert agents | {"overlap_s", "tokens_per_s", "versions"} <= line.keys()
            assert {f"loop_lag_ms/{name}" for name in processes} <= line.keys()
            figures = {"rows_ready/store", "engine_steps/solver-0", "transport_running/trainer"}
            assert {f"actor.{figure}" for figure in figures} <= line.keys()
            assert line["versions"] == {"solver": line["step"], "checker": line["step"]}
            assert line["stale_samples"] == 0 and line["failed_trajectories"] == 0
        assert ["eval/accuracy" in line for line in whole.metrics] == [False] * 5 + [True]

    def test_events_tell_its_course(self, whole: Launched) -> None:
        names = Counter(event["event"] for event in whole.events)
        assert names["run_started"] == names["run_ended"] == 1
        assert not names["actor_silent"], "those that are being stopped have no time to answer"
        assert names["sft_done"] == names["evaluated"] == 2
        assert names["checkpoint_saved"] == 4, "the first one after the supervised batches"
        ended = whole.events[-1]
        wall_s = ended.pop("wall_s")
        assert ended | {"time": 0} == {
            "time": 0,
            "event": "run_ended",
            "step": 6,
            "stopped": False,
            "checkpoint": str(whole.directory / "checkpoints" / "step_000006"),
        }
        assert f"Trained 6 steps in {duration(wall_s)}. " in whole.text, "one wall time"
        assert f"wall={duration(wall_s)}\n" in whole.text

    def test_the_newest_checkpoints_stay_and_are_models(self, whole: Launched) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folders = sorted(path.name for path in (whole.directory / "checkpoints").iterdir())
        assert folders == ["step_000004", "step_000006"]
        for agent in ("solver", "checker"):
            folder = whole.directory / "checkpoints" / "step_000006" / agent
            model = AutoModelForCausalLM.from_pretrained(folder)
            tokens = AutoTokenizer.from_pretrained(folder)("12=", return_tensors="pt").input_ids
            assert model(tokens).logits.shape == (1, 3, 14)

    def test_the_report_needs_nothing_else(self, whole: Launched, capsys: pytest.CaptureFixture[str]) -> None:
        report = whole.directory / "report.html"
        text = report.read_text()
        assert "accuracy" in text
        assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:|//)|@import|url\(""", text)
        report.unlink()
        assert main(["report", str(whole.directory)]) == 0
        assert capsys.readouterr().out.strip() == str(report)
        assert report.exists()

    def test_going_on_with_it_says_that_it_is_complete(
        self, whole: Launched, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = (whole.directory / "metrics.jsonl").read_bytes()
        assert main(["train", "--resume", str(whole.directory)]) == 0
        assert "is complete: all 6 steps are trained" in capsys.readouterr().out
        assert (whole.directory / "metrics.jsonl").read_bytes() == before


# --------------------------------------------------------------------------- killed, stopped, resumed


@dataclass
class Interrupted:
    """One run in three pieces: its launcher is killed in step 4, ctrl-C comes in step 5, the third ends it in this
    process."""

    killed: Launched
    stopped: Launched
    ended: Finished
    metrics_when_killed: list[int]
    idle_cpu_share: dict[str, float]
    refusal: str


@pytest.fixture(scope="module")
def pieces(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    folder = tmp_path_factory.mktemp("pieces")
    hold, trace = folder / "hold", folder / "trace"
    hold.write_text("3")  # the queries' positions count from 0: the first of step 4
    killed = launcher.train("pieces", *REPRODUCIBLE, f"data.hold={hold}", f"data.trace={trace}")
    killed.wait_for_step(3)
    wait_until((killed.directory / "checkpoints" / "step_000002").exists, "the checkpoint of step 2")
    killed.signal(signal.SIGKILL)
    killed.wait()
    killed.assert_nothing_is_left()
    metrics_when_killed = [line["step"] for line in killed.metrics]

    hold.write_text("4")
    stopped = launcher.resume("pieces")
    stopped.wait_for_step(4)
    waiting = {**stopped.actors(), "launcher": psutil.Process(stopped.process.pid)}
    del waiting["rollout-0"]  # its workflow asks again and again whether the file is still there
    idle = _idle_cpu_share(waiting)
    second = launcher.resume("pieces")
    assert second.wait() == 2
    stopped.signal(signal.SIGINT)
    stopped.wait_for_output("SIGINT: stopping after the steps under way")
    hold.unlink()
    assert stopped.wait() == 130, stopped.text

    ended = RunsHere(launcher.runs).resume("pieces")
    assert "step 6/6" in ended.text
    assert ended.status == 0, ended.text
    return Interrupted(killed, stopped, ended, metrics_when_killed, idle, second.text)


IDLE = 0.02  # of a core


def _idle_cpu_share(processes: dict[str, psutil.Process]) -> dict[str, float]:
    """CPU seconds in the first two idle seconds. The step before may still be written when they begin."""
    for _ in range(5):
        shares = _cpu_share(processes, 2.0)
        if max(shares.values()) < IDLE:
            break
    return shares


def _cpu_share(processes: dict[str, psutil.Process], seconds: float) -> dict[str, float]:
    def used() -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}

    before = used()
    time.sleep(seconds)  # what is measured is what happens in this time
    return {name: (after - before[name]) / seconds for name, after in used().items()}


class TestARunInPieces:
    def test_when_the_launcher_is_killed_the_finished_steps_are_on_disk(self, pieces: Interrupted) -> None:
        assert pieces.metrics_when_killed == [1, 2, 3]

    def test_ctrl_c_ends_it_after_the_step_under_way_with_a_checkpoint(self, pieces: Interrupted) -> None:
        last = pieces.stopped.text.splitlines()[-4:]
        assert (
            last[0]
            == f"Stopped after step 5. Continue with: flexmarl train --resume {pieces.stopped.directory}"
        )
        assert last[3].endswith("step_000005")
        pieces.stopped.assert_nothing_is_left()
        pieces.stopped.assert_logs_are_clean()

    def test_each_step_is_in_the_metrics_once_and_in_order(self, pieces: Interrupted) -> None:
        assert [line["step"] for line in pieces.ended.metrics] == [1, 2, 3, 4, 5, 6]
        assert [line["versions"]["solver"] for line in pieces.ended.metrics] == [1, 2, 3, 4, 5, 6]
        assert "eval/accuracy" in pieces.ended.metrics[-1]

    def test_it_goes_on_where_the_checkpoint_was(self, pieces: Interrupted) -> None:
        resumed = [event["step"] for event in pieces.ended.events if event["event"] == "run_resumed"]
        assert resumed == [2, 5]

    def test_no_query_is_lost_and_only_the_steps_after_the_checkpoint_are_taken_again(
        self, pieces: Interrupted
    ) -> None:
        trace = Path(pieces.ended.directory / "config.yaml").read_text().split("trace: ")[1].split()[0]
        queries = Counter(line.split()[0] for line in Path(trace).read_text().splitlines())
        # Step 3 was trained, but not saved, before the kill.
        assert queries == {"q000": 4, "q001": 4, "q002": 8, "q003": 4, "q004": 4, "q005": 4}

    def test_it_ends_bit_for_bit_as_if_nothing_had_happened(
        self, pieces: Interrupted, whole: Launched
    ) -> None:
        for agent in ("solver", "checker"):
            for name in ("model.safetensors", "training_state.safetensors", "training_state.json"):
                file = Path("checkpoints") / "step_000006" / agent / name
                assert (pieces.ended.directory / file).read_bytes() == (
                    whole.directory / file
                ).read_bytes(), file
        rewards = [[line["reward/solver"] for line in run.metrics] for run in (pieces.ended, whole)]
        assert rewards[0] == rewards[1]

    def test_no_other_process_may_work_on_it_meanwhile(self, pieces: Interrupted) -> None:
        assert "another process is working on this run" in pieces.refusal

    def test_waiting_costs_no_cpu_time(self, pieces: Interrupted) -> None:
        busy = {name: share for name, share in pieces.idle_cpu_share.items() if share >= IDLE}
        assert not busy


# Two agents that use one policy of two engines, and one with a policy of its own. Several queries a step, whose groups
# end in any order.
DETERMINISTIC = (
    "deterministic=true", "training.queries_per_step=6", "training.micro_batch=5", "training.steps=4",
    "checkpoint.every=2", "policies={shared: {instances: 2}}", "data.shape=trio",
    "agents={solver: {policy: shared}, checker: {policy: shared, sampling: {temperature: 0.7}}, judge: {}}",
)  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(runs_here: RunsHere) -> Finished:
    """A deterministic run that nothing disturbs."""
    run = runs_here.train("unbroken", *DETERMINISTIC)
    assert run.status == 0, run.text
    assert "deterministic: engines generate one turn at a time" in run.text
    return run


def test_a_deterministic_run_and_its_resumed_half_with_more_rollout_workers_have_bit_equal_losses(
    runs_here: RunsHere, unbroken: Finished
) -> None:
    """As after a kill of all processes behind the checkpoint of step 2: the files that are written later go.

    Each trajectory has its random numbers from its own name, whichever worker runs it.
    """
    broken = shutil.copytree(unbroken.directory, runs_here.runs / "resumed")
    shutil.rmtree(broken / "checkpoints" / "step_000004")
    (broken / "report.html").unlink()
    resumed = runs_here.resume("resumed", "rollout.workers=3")
    assert resumed.status == 0, resumed.text
    assert "deterministic: engines generate one turn at a time" in resumed.text
    dealt = [
        {name for name in run.metrics[-1] if name.startswith("cpu_s/rollout-")} for run in (unbroken, resumed)
    ]
    assert [len(workers) for workers in dealt] == [1, 3]
    assert_bit_equal(resumed, unbroken, 4, ("shared", "judge"), 7)


# --------------------------------------------------------------------------- supervised batches


def test_a_mistake_that_shows_after_the_supervised_batches_costs_none_of_them(
    runs_here: RunsHere, tmp_path: Path
) -> None:
    recipe = Path(shutil.copytree(TINY, tmp_path / "recipe"))
    workflow, right = recipe / "workflow.py", (TINY / "workflow.py").read_text()
    workflow.write_text(right.replace("asked: dict[str, Any] = query.data", "raise ValueError('a mistake')"))
    settings = ("agent_defaults.sft.batches=3", "training.steps=2", "data.shape=alone", "agents={solver: {}}")
    failed = runs_here.train("tuned", *settings, recipe=recipe)
    assert failed.status == 1 and "a mistake" in failed.text
    assert [path.name for path in (failed.directory / "checkpoints").iterdir()] == ["step_000000"]

    workflow.write_text(right)
    resumed = runs_here.resume("tuned", "--accept", "workflow.py", "policies.solver.optimizer.lr=2.0e-3")
    assert resumed.status == 0, resumed.text
    assert "continuing after the supervised batches" in resumed.text
    assert [event["event"] for event in resumed.events].count("sft_done") == 1
    assert [line["lr/solver"] for line in resumed.metrics] == [2e-3] * 2

    whole = runs_here.train("at-once", *settings, "agents.solver.optimizer.lr=2.0e-3", recipe=recipe)
    assert whole.status == 0, whole.text
    assert [line["step"] for line in resumed.metrics] == [line["step"] for line in whole.metrics]


# --------------------------------------------------------------------------- other shapes of runs


def test_sync_with_agents_called_unevenly_and_two_instances(runs_here: RunsHere) -> None:
    run = runs_here.train(
        "uneven", "mode=sync", "agents={solver: {instances: 2}, checker: {}, idle: {}}", "data.shape=uneven",
        "training.queries_per_step=1", "training.micro_batch=4", "training.steps=4", *SIMULATED_POLICIES,
    )  # fmt: skip
    assert run.status == 0 and not run.problems, run.text
    loaded = {event["instance"] for event in run.events if event["event"] == "weights_path_chosen"}
    assert loaded == {"solver-0", "solver-1", "checker-0", "idle-0"}
    assert [line["versions"] for line in run.metrics] == [
        {"solver": 1, "checker": 0, "idle": 0},
        {"solver": 2, "checker": 1, "idle": 0},
        {"solver": 3, "checker": 1, "idle": 0},
        {"solver": 4, "checker": 2, "idle": 0},
    ]
    assert [line["samples/solver"] for line in run.metrics] == [8, 8, 8, 8]
    assert [line.get("samples/checker") for line in run.metrics] == [None, 4, None, 4]
    assert all(line["overlap_s"] == 0 and line["stale_samples"] == 0 for line in run.metrics)


def test_groups_of_turns_and_a_critic_are_trained_on_while_rollouts_run(runs_here: RunsHere) -> None:
    run = runs_here.train(
        "streaming",
        "data.shape=uneven",
        "training.steps=2",
        "agents.solver.algorithm.name=at_grpo",
        "agents.checker.algorithm={name: ppo, critic: {lr: 1.0e-3}, kl_coefficient: 0.1}",
    )
    assert run.status == 0 and not run.problems, run.text
    assert "can't train" not in run.text, "nothing waits for the step's rollout"
    for line in run.metrics:
        assert line["value_loss/checker"] > 0 and "value_loss/solver" not in line
        assert line["samples/solver"] == 16 and line["samples/checker"] == 4
    critics = runs_here.runs.glob("streaming/checkpoints/step_000002/*/critic.safetensors")
    assert [path.parent.name for path in critics] == ["checker"]
