"""The mistakes that new users made, each in a small recipe: the run is refused before it starts, and has no folder.

Not here: mistakes that only a run shows (a workflow that blocks its loop, rewards that are all equal), those of weights
and devices (``test_preflight.py``), and a tool without types, which is a warning (``test_trial.py``).
"""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
import torch  # noqa: F401  # imported first: the process of the checks forbids it
import yaml

from flexmarl.launch.cli.main import main
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.run.preflight import preflight, process
from flexmarl.launch.run.preflight.recipe_checks import recipe_findings
from flexmarl.launch.run.preflight.trial import play_trial
from flexmarl.launch.run.run import Run

from ...conftest import TINY

FUNCTIONS = {
    "imports": "import asyncio, random\nfrom pathlib import Path\nfrom flexmarl.actors import Query, Rewards",
    "train_query": "def train_query(position, seed): return Query(f'q{position}', f'training {position}')",
    "eval_queries": "def eval_queries(seed): return [Query(f'e{number}', f'test {number}') for number in range(3)]",
}
TURN = 'turn = await agents["solver"].generate(query.text)\n'
RIGHT = f"{TURN}return Rewards(solver=1.0)"
CHAT = '[{"role": "user", "content": query.text}]'
CONFIG: dict[str, Any] = {
    "agents": {"solver": {"engine": {"name": "simulated", "max_context": 512}, "trainer": {"name": "simulated"}}},
    "training": {"steps": 1, "queries_per_step": 4, "trajectories_per_query": 4, "micro_batch": 4},
}  # fmt: skip
TINY_MODEL = yaml.safe_load((TINY / "config.yaml").read_text())["agent_defaults"]["model"]
REAL = {"model": TINY_MODEL | {"tokenizer": str(TINY / "tokenizer")}}
REAL_RUN = f"agents={{solver: {REAL}, judge: {REAL}}}"


@dataclass(frozen=True)
class Mistake:
    """``words``: of the message. ``body``: of the workflow. ``functions``: in place of the right ones, by name.
    ``config``: the text of ``config.yaml``. ``arguments``: of the command line, behind the recipe."""

    name: str
    words: str
    body: str = RIGHT
    functions: dict[str, str] = field(default_factory=dict)
    config: str | None = None
    arguments: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        workflow = f"async def workflow(query, agents):\n{indent(dedent(self.body), '    ')}"
        folder.mkdir()
        (folder / "workflow.py").write_text(
            "\n".join({**FUNCTIONS, "workflow": workflow, **self.functions}.values())
        )
        (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG) if self.config is None else self.config)


MISTAKES = [
    # Keys and values
    Mistake("wrong key", "agents.solver.sampling.max_tokens", arguments=("agents.solver.sampling.max_tokens=8",)),
    Mistake("wrong type", "training.steps='ten'", arguments=("training.steps=ten",)),
    Mistake("tab in YAML", "line 2, column 1", config="agents:\n\tsolver: {}\n"),
    Mistake("negative steps", "training.steps=-5", arguments=("training.steps=-5",)),
    Mistake("no queries", "training.queries_per_step=0", arguments=("training.queries_per_step=0",)),
    Mistake("agent for agents", "agents: ", config="agent: {solver: {}}\ntraining: {steps: 1}\n"),
    Mistake("agents as a list", "agents", config="agents: [solver]\ntraining: {steps: 1}\n"),
    Mistake("dtype bf16", "agents.solver.model.dtype", arguments=(REAL_RUN, "agents.solver.model.dtype=bf16")),
    Mistake("load_in_4bit", "load_in_4bit", arguments=(REAL_RUN, "agents.solver.model.load_in_4bit=true")),
    Mistake("empty stop string", "stop", arguments=("agents.solver.sampling.stop=['']",)),
    Mistake("micro-batch beyond the batch", "training.micro_batch=64", arguments=("training.micro_batch=64",)),
    Mistake("one trajectory for grpo", "grpo compares", arguments=("training.trajectories_per_query=1",)),
    Mistake("unknown engine", "sglang", arguments=("agents.solver.engine.name=sglang",)),
    Mistake("unknown algorithm", "gropo", arguments=("agents.solver.algorithm.name=gropo",)),
    Mistake("lr at the top", "lr", arguments=("lr=0.1",)),
    Mistake("optimizer at the top", "optimizer", arguments=("optimizer.lr=0.1",)),
    Mistake("cosine schedule", "'linear'", arguments=("agents.solver.optimizer.schedule=cosine",)),
    Mistake("policy typo", "solvr", arguments=("agents.judge={policy: solvr}",)),
    Mistake("spaces around =", "training.steps", arguments=("training.steps", "=", "5")),
    Mistake("name exists", "choose another --name", arguments=("--runs", ".", "--name", "recipe")),
    Mistake("disk unwritable", "config.yaml/runs", arguments=("--runs", "recipe/config.yaml/runs")),
    # Functions of the recipe
    Mistake("sync workflow", "is not async", functions={"workflow": "def workflow(query, agents): ..."}),
    Mistake(
        "sync workflow with await",
        "'await' outside async function",
        functions={"workflow": "def workflow(query, agents): await query"},
    ),
    Mistake("import error", "No module named 'nothing'", functions={"imports": "import nothing"}),
    Mistake("data key unknown", "data.largest", arguments=("data.largest=3",)),
    Mistake(
        "data file missing",
        "FileNotFoundError",
        functions={"train_query": "def train_query(position, seed): return Path('none.txt').read_text()"},
    ),
    Mistake(
        "duplicate training ids",
        "step 1 has two queries with the id 'q'",
        functions={"train_query": "def train_query(position, seed): return Query('q', f'{position}')"},
    ),
    Mistake(
        "duplicate evaluation ids",
        "eval_queries gives two queries the id 'e'",
        functions={"eval_queries": "def eval_queries(seed): return [Query('e', 'x'), Query('e', 'y')]"},
    ),
    Mistake(
        "random train_query",
        "train_query(0, seed) gives another query",
        functions={"train_query": "def train_query(position, seed): return Query(f'{position}', f'{random.random()}')"},
    ),
    Mistake(
        "evaluation among training",
        "is evaluation query 'e0' too",
        functions={"eval_queries": "def eval_queries(seed): return [Query('e0', 'training 0')]"},
        arguments=("evaluation.held_out=true",),
    ),
    # Models
    Mistake("model path missing", "./nowhere", arguments=("agents={solver: {model: {path: ./nowhere}}}",)),
    Mistake("unknown model", "there is no such folder", arguments=("agents={solver: {model: {path: no/model}}}",)),
    # The first trajectory
    Mistake("missing agent", "agent 'critic', which the config lacks", "await agents['critic'].generate('x')"),
    Mistake("wrong reward name", "rewards agent 'solverr'", f"{TURN}return Rewards(solver=1.0, solverr=1.0)"),
    Mistake("reward None", "reward of 'solver' is None", f"{TURN}return Rewards(solver=None)"),
    Mistake("reward nan", "reward of 'solver' is nan", "return Rewards(solver=float('nan'))"),
    Mistake("no reward", "returned no reward for it", f"{TURN}return Rewards()"),
    Mistake("rewards: turn forgotten", "algorithm.rewards to both or turn", f"{TURN}return Rewards().of(turn, 1.0)"),
    Mistake("metric is a string", "'high'", f"{TURN}return Rewards(solver=1.0, metrics={{'accuracy': 'high'}})"),
    Mistake("returns None", "returned NoneType, not Rewards", TURN),
    Mistake("returns float", "returned float, not Rewards", f"{TURN}return 1.0"),
    Mistake("generate not awaited", "write `await` before the call", "return agents['solver'].generate('x').text"),
    Mistake("wrong argument of generate", "max_tokens", "await agents['solver'].generate('x', max_tokens=5)"),
    Mistake("prompt too long", "3501 prompt tokens", "await agents['solver'].generate('x' * 3501)"),
    Mistake(
        "max_new_tokens beyond the context",
        "lower agents.solver.sampling.max_new_tokens=4096",
        arguments=("agents.solver.sampling.max_new_tokens=4096",),
    ),
    Mistake(
        "sync tool",
        "the tool add is not an async function",
        f"def add(a: int): ...\nawait agents['solver'].generate({CHAT}, tools=[add])",
    ),
    Mistake(
        "no chat template",
        "has no chat template",
        f"await agents['solver'].generate({CHAT})",
        arguments=(REAL_RUN,),
    ),
    Mistake(
        "turn to another vocabulary",
        "put the turn's .text there",
        f"{TURN}await agents['judge'].generate([turn, 'right?'])",
        arguments=(REAL_RUN, "agents.judge.model.tokenizer=other", "agent_defaults.sampling={max_new_tokens: 4}"),
    ),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _checks_in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process for each mistake would take seconds."""

    def findings_of(config: RunConfig, notify: Callable[[str], object]) -> dict[str, Any]:
        of_recipe = recipe_findings(config)
        findings = process._findings(config, of_recipe)
        if findings["trial"]:
            (tmp_path / "trial").mkdir(mode=0o700)
            assert of_recipe.recipe is not None
            trial = asdict(
                play_trial(
                    config, of_recipe.recipe, of_recipe.training, of_recipe.evaluation, tmp_path / "trial"
                )
            )
            findings["recipe"] += trial["problems"]
        return findings

    async def refuse(*_: object) -> None:
        raise AssertionError("a run was started")

    monkeypatch.setattr(preflight, "_findings", findings_of)
    monkeypatch.setattr(Run, "_until_the_end", refuse)
    monkeypatch.chdir(tmp_path)


pytestmark = pytest.mark.usefixtures("forgotten_recipes")


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_it_is_refused_before_the_start(
    mistake: Mistake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake.write(tmp_path / "recipe")
    shutil.copytree(TINY / "tokenizer", tmp_path / "recipe" / "other")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["train", "recipe", *mistake.arguments]) == 2
    assert mistake.words in capsys.readouterr().err
    assert sorted({path.name for path in tmp_path.iterdir()} - {"trial"}) == before


def test_the_recipe_without_a_mistake_is_not_refused(tmp_path: Path) -> None:
    Mistake("none", "").write(tmp_path / "recipe")
    assert main(["train", "recipe", "--dry-run"]) == 0
    assert main(["train", "recipe", "--dry-run", REAL_RUN, "checks.trajectory=false"]) == 0
