"""The page's example of an added estimator: its class and its row are enough for a run and for ``flexmarl store``."""

import json
import statistics
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from flexmarl.actors.credit.algorithms import ALGORITHMS
from flexmarl.actors.credit.estimator import STD_EPSILON, Estimator
from flexmarl.launch.cli.main import main

from ..pages import blocks
from .conftest import SIMULATED_POLICIES, TINY
from .in_process import RunsHere


@pytest.fixture
def median(tmp_path: Path) -> Iterator[type[Estimator]]:
    """The estimator of the page, with its row in the table."""
    (block,) = (block for block in blocks("algorithms.md") if block.file == "group_median.py")
    (tmp_path / block.file).write_text(block.text)
    spec = spec_from_file_location("group_median", tmp_path / block.file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    before = dict(ALGORITHMS)
    try:
        spec.loader.exec_module(module)
        yield module.GroupMedian
    finally:
        ALGORITHMS.clear()
        ALGORITHMS.update(before)


def test_its_class_and_its_row_are_enough_for_a_run(
    median: type[Estimator], runs_here: RunsHere, capsys: pytest.CaptureFixture[str]
) -> None:
    for vector in median.vectors:
        assert median(vector.scale)(vector.rewards) == pytest.approx(vector.advantages)
    run = runs_here.train(
        "median",
        "agents.solver.algorithm.name=median",
        "agent_defaults.engine.token_s=1.0e-3",
        "training={steps: 2, queries_per_step: 6, trajectories_per_query: 8, micro_batch: 8}",
        recipe=TINY.parent / "simulated",
    )
    assert run.status == 0, run.text
    assert main(["store", str(run.directory), "agent = 'solver'", "--limit", "1000", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row["reward"])
    assert len(groups) == 2 * 6 and {row["group_size"] for row in rows} == {8}
    for row in rows:
        rewards = groups[row["group"]]
        centred = row["reward"] - statistics.median(rewards)
        assert row["advantage"] == pytest.approx(centred / (statistics.stdev(rewards) + STD_EPSILON))
    assert main(["store", str(run.directory), "agent = 'solver' and advantage > 2", "--json"]) == 0
    high = json.loads(capsys.readouterr().out)
    assert high["total"] == sum(row["advantage"] > 2 for row in rows) > 0


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (("training={steps: 1, queries_per_step: 8, trajectories_per_query: 1, micro_batch: 4}",), "wants 2 or more"),
        (("agents.solver.algorithm.kl_in_reward=true",), "median has its KL in the loss"),
    ],
)  # fmt: skip
def test_the_config_knows_what_it_needs(
    median: type[Estimator], runs_here: RunsHere, settings: tuple[str, ...], refusal: str
) -> None:
    refused = runs_here.train(
        "refused", *SIMULATED_POLICIES, "agents.solver.algorithm.name=median", *settings
    )
    assert refused.status == 2 and refusal in refused.text
    unknown = runs_here.train("unknown", *SIMULATED_POLICIES, "agents.solver.algorithm.name=mean")
    assert unknown.status == 2 and "'mnpo' or 'median'" in unknown.text
