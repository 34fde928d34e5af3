"""Explorations of real runs: by quantised instances, and by instances that are killed. None of their samples is
trained."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from .conftest import SIMULATED, Launched, Launcher, wait_until
from .in_process import RunsHere
from .run_files import assert_bit_equal, trained

COUNT, SIZE, QUERIES, STEPS = 6, 2, 4, 3
GROUPS = (
    f"rollout.explorations={{count: {COUNT}}}",
    f"training={{steps: {STEPS}, queries_per_step: {QUERIES}, trajectories_per_query: {SIZE}, micro_batch: 4}}",
    "checkpoint.every=1",
)
FULL_TOKENS, CHEAP_TOKENS = 2, 3
# Without a spread every answer has the engine's own length: the tokens of samples say which engine generated them.
LENGTHS = (
    "engine.sigma=0", f"engine.median_tokens={FULL_TOKENS}", "engine.token_s=0.005",
    f"policies={{scout: {{explores: solver, instances: 2, engine: {{median_tokens: {CHEAP_TOKENS}}}}}}}",
    "agents.solver.instances=2",
)  # fmt: skip


def assert_only_full_samples_were_trained(run: Launched) -> None:
    for line in run.metrics:
        assert line["samples/solver"] == QUERIES * SIZE
        assert line["tokens/solver"] == QUERIES * SIZE * FULL_TOKENS
        assert line["explorations"] == QUERIES * COUNT
        assert line["explored_tokens"] == QUERIES * COUNT * CHEAP_TOKENS
    assert [line["step"] for line in run.metrics] == [*range(1, STEPS + 1)]
    counts = trained(run.directory)
    assert len(counts) == STEPS * QUERIES * SIZE and set(counts.values()) == {1}
    groups = Counter(name.rpartition("_")[0] for name in counts)
    assert set(groups.values()) == {SIZE}


@pytest.mark.parametrize("balancing", ["intra", "intra+inter"])
def test_an_explorer_that_is_killed_leaves_no_sample_and_the_run_continues(
    launcher: Launcher, tmp_path: Path, balancing: str
) -> None:
    """Instances move between the policy and its explorer, if the balancing says so, while others are killed."""
    hold = tmp_path / "hold"
    hold.write_text(str(QUERIES))
    balance = f"balance={{scope: {balancing}, threshold: 0.5}}"
    run = launcher.train(f"explored-{balancing}", *SIMULATED, *LENGTHS, *GROUPS, balance, f"data.hold={hold}")
    run.wait_for_step(1)
    actors = run.actors()
    hold.unlink()
    for name in ("scout-0", "solver-1"):
        actors[name].kill()
    restarted = "actor_restarted"
    wait_until(
        lambda: run.process.poll() is not None or [e["event"] for e in run.events].count(restarted) == 2,
        "restarts",
    )
    assert run.wait() == 0, run.text
    assert_only_full_samples_were_trained(run)
    run.assert_nothing_is_left()


_SCOUTS = ", ".join(
    f"{agent}_scout: {{explores: {agent}, engine: {{quantization: int8}}}}" for agent in ("solver", "checker")
)
QUANTISED = (
    f"policies={{{_SCOUTS}}}", *GROUPS, "agent_defaults.sft={batches: 2, batch_size: 4}", "weights.probe_every=1",
)  # fmt: skip


def test_a_run_with_quantised_explorers_trains_what_its_own_engine_generates(runs_here: RunsHere) -> None:
    run = runs_here.train("quantised", *QUANTISED)
    assert run.status == 0 and not run.problems, run.text
    for line in run.metrics:
        assert line["explorations"] == QUERIES * COUNT and line["samples/solver"] == QUERIES * SIZE
        assert line["explored_tokens"] > line["tokens"] > 0 == line["stale_samples"]
        assert line["unlike_explorations"] <= QUERIES * SIZE // 2 if "unlike_explorations" in line else True


def test_a_resumed_run_with_explorers_repeats_the_steps_bit_for_bit(runs_here: RunsHere) -> None:
    """As after a kill of all processes behind the checkpoint of step 1: the files that are written later go."""
    whole = runs_here.train("explored", *QUANTISED, "deterministic=true")
    assert whole.status == 0, whole.text
    broken = shutil.copytree(whole.directory, runs_here.runs / "explored-again")
    for step in range(2, STEPS + 1):
        shutil.rmtree(broken / "checkpoints" / f"step_{step:06d}")
    (broken / "report.html").unlink()
    resumed = runs_here.resume("explored-again")
    assert resumed.status == 0, resumed.text
    tokens = [[(line["explored_tokens"], line["tokens"]) for line in run.metrics] for run in (whole, resumed)]
    assert tokens[0] == tokens[1]
    assert_bit_equal(resumed, whole, STEPS, ("solver", "checker"), 4)
