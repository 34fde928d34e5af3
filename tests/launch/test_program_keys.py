"""The keys of a run's sessions are in none of its files."""

from pathlib import Path

from .conftest import Launcher
from .test_programs import RECIPE

WORKFLOW = """
import sys
from pathlib import Path
from flexmarl.actors import Query, open_gateway

COMMAND = [sys.executable, {program!r}, "a task"]


async def workflow(query, agents):
    async with open_gateway(agents) as gateway:
        with open({keys!r}, "a") as keys:
            keys.write(gateway.key + "\\n")
        fault = query.data["fault"]
        end = await gateway.run([*COMMAND, fault] if fault else COMMAND)
    return gateway.rewards(end)


def train_query(position, seed):
    return Query(f"q{{position}}", "", {{"fault": ["", "unknown model", "killed", "mid-stream"][position % 4]}})


def eval_queries(seed):
    return []
"""


def test_no_file_of_a_run_has_a_key(tmp_path: Path, launcher: Launcher) -> None:
    recipe, keys = tmp_path / "recipe", tmp_path / "keys"
    recipe.mkdir()
    program = str(RECIPE / "program.py")
    (recipe / "workflow.py").write_text(WORKFLOW.format(program=program, keys=str(keys)))
    (recipe / "config.yaml").write_text((RECIPE / "config.yaml").read_text())
    settings = "training={steps: 1, queries_per_step: 4, trajectories_per_query: 2, micro_batch: 2}"
    run = launcher.train("keys", settings, "rollout.max_failed_share=1", recipe=recipe, prelude="")
    assert run.wait() == 0, run.text
    (step,) = run.metrics
    assert step["failed_trajectories"] == 2 * 3
    written = keys.read_bytes().split()
    assert len(written) == len({*written}) >= 8, "those of the trial too"
    files = [path for path in run.directory.rglob("*") if path.is_file()]
    assert any(path.suffix == ".log" and path.stat().st_size for path in files)
    for path in (*files, run.output):
        content = path.read_bytes()
        assert not [key for key in written if key in content], path
