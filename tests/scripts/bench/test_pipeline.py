"""``scripts/bench/run pipeline``: the bound by hand, and the command with times too short for its figures."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flexmarl.actors.messages import Sample
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.backend_config import SimulatedTrainerConfig
from scripts.bench.commands import main
from scripts.bench.pipeline import Options, barrier_bound_s, lower_bounds_s, parts, scaled, tables
from scripts.bench.virtual_rollouts import ClosedGroup

from ...bench_tables import drawn
from ...patience import PATIENCE_S

_TINY = (
    *("training.queries_per_step=4", "training.trajectories_per_query=2", "training.micro_batch=2"),
    *(f"agents.{agent}.engine.token_s=5.0e-4" for agent in ("planner", "solver", "checker")),
)
_KEYS = {"sync_s", "strict_s", "lower_bound_s", "orchestrator_core_share"}


def group(closed_s: float, **tokens: list[int]) -> ClosedGroup:
    samples = [
        Sample(f"{agent}{closed_s}{n}", agent, 1, 0, "g", 1.0, 0.0, (), (1,) * count, (0.0,) * count)
        for agent, counts in tokens.items()
        for n, count in enumerate(counts)
    ]
    return ClosedGroup(closed_s, samples)


TRAINER = SimulatedTrainerConfig(token_s=1.0, optimizer_s=10.0)
A, B, SHARED = PolicyName("a"), PolicyName("b"), PolicyName("shared")
OWN = {AgentName("a"): A, AgentName("b"): B}


def test_the_bound_where_rollouts_last_longer() -> None:
    groups = [group(1.0, a=[1, 1]), group(500.0, a=[2, 3, 4])]
    # the last micro-batch is the fifth sample alone
    assert barrier_bound_s(groups, 2, {A: TRAINER}, OWN, install_s=7.0) == 500.0 + 4 + 10 + 7


def test_the_bound_where_training_lasts_longer() -> None:
    groups = [group(1.0, a=[1], b=[50]), group(2.0, a=[1], b=[50]), group(3.0, a=[1], b=[50])]
    trainers = {A: TRAINER, B: TRAINER}
    assert barrier_bound_s(groups, 2, trainers, OWN, install_s=7.0) == 2.0 + 3 + 150 + 2 * 10
    # with no micro-batch full before the end, training can't begin earlier
    assert barrier_bound_s(groups, 4, trainers, OWN, install_s=7.0) == 3.0 + 3 + 150 + 2 * 10


def test_the_bound_of_two_agents_with_one_policy() -> None:
    """Their rows are trained together, and one optimizer step takes them all."""
    one = dict.fromkeys(OWN, SHARED)
    groups = [group(1.0, a=[1], b=[50]), group(2.0, a=[1], b=[50]), group(3.0, a=[1], b=[50])]
    # the first group's two rows fill a micro-batch: training begins when it has closed
    assert barrier_bound_s(groups, 2, {SHARED: TRAINER}, one, install_s=7.0) == 1.0 + 3 + 150 + 10
    groups = [group(1.0, a=[1], b=[2]), group(500.0, a=[3], b=[4])]
    # the last micro-batch is the fourth row alone
    assert barrier_bound_s(groups, 3, {SHARED: TRAINER}, one, install_s=7.0) == 500.0 + 4 + 10 + 7


def test_bounds_are_those_of_the_seed() -> None:
    options = Options(steps=3, overrides=_TINY)
    bounds = lower_bounds_s(options.config("sync"))
    assert len(set(bounds)) == 3 and bounds == lower_bounds_s(options.config("strict"))
    assert bounds != lower_bounds_s(Options(steps=3, seed=1, overrides=_TINY).config("sync"))
    half = lower_bounds_s(scaled(options.config("sync"), 0.5))
    assert half == pytest.approx([bound / 2 for bound in bounds])


def test_nothing_else_is_scaled() -> None:
    whole, quarter = (
        scaled(Options().config("strict"), factor).policies[PolicyName("solver")].engine.model_dump()
        for factor in (1, 0.25)
    )
    assert quarter == whole | {"token_s": 1e-3, "install_s": 0.0125}
    assert quarter["name"] == "simulated" and whole["median_tokens"] == 16


def _start(program: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [program, "pipeline", *words, *_TINY],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def run(program: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The JSON object and the text on standard error."""
    process = _start(program, "--json", "--rounds=1", "--steps=3")
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
        yield json.loads(out), err  # nothing else on standard output, or this raises
    finally:
        process.kill()


def test_every_figure_is_there_and_possible(run: tuple[dict[str, Any], str]) -> None:
    result, err = run
    assert result.keys() >= _KEYS
    bounds = lower_bounds_s(Options(steps=3, overrides=_TINY).config("sync"))
    assert result["lower_bound_s"] == pytest.approx((bounds[1] + bounds[2]) / 2, rel=1e-3)
    # a barrier between all and rollouts that overlap nothing: never faster than the bound
    assert result["sync_s"] > result["lower_bound_s"]
    assert 0 < result["strict_s"] < 600 and 0 <= result["orchestrator_core_share"] < 10
    assert {"orchestrator", "rollout-0", "store", "trainer", "checker-0"} <= result["load"][
        "core_share"
    ].keys()
    assert [(goal["key"], goal["goal"]) for goal in result["goals"]] == [
        ("strict_s", "<= 0.6x sync"), ("strict_s", "<= 1.1x bound"), ("orchestrator_core_share", "<= 0.1"),
    ]  # fmt: skip
    names = [
        "how busy the machine is with other things",
        "the lower bound, in virtual time",
        "sync, round 1 of 1",
        "strict, round 1 of 1",
        "the orchestrator under load",
    ]
    # A busy machine has warnings of the runtime there too.
    assert [line for line in err.splitlines() if line in names] == names
    assert len(names) == parts(Options(rounds=1))


def test_table(run: tuple[dict[str, Any], str]) -> None:
    text = drawn(tables, {**run[0], "machine": {**run[0]["machine"], "busy_percent": 31.4}})
    for words in ("<= 0.6x sync", "<= 1.1x bound", "orchestrator 0.", "31 % busy"):
        assert words in text


def test_ctrl_c_leaves_nothing(program: Path) -> None:
    process = _start(program, "--rounds=1000", "--steps=3")
    try:
        assert process.stderr is not None
        while (line := process.stderr.readline()) != "sync, round 1 of 1000\n":
            assert line, "it ended"
        family = psutil.Process(process.pid)
        while len(children := family.children(recursive=True)) < 7:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "flexmarl: stopped" in err and "Traceback" not in err and not out
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert not alive


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--rounds=0"], "0 is not in the range"),
        (["--steps=1"], "1 is not in the range"),
        (["training.micro_batch=0"], "training.micro_batch=0"),
        (["agents.solver.engine.sigm=1"], "sigm"),
        (["agents.judge.instances=1"], "there is no agent 'judge'"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], words: list[str], problem: str) -> None:
    assert main(["pipeline", *words]) == 2
    assert problem in capsys.readouterr().err
