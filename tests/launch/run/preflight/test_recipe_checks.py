"""Mistakes in a recipe that show before anything starts."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from flexmarl.launch.config.config_reading import check
from flexmarl.launch.run.preflight.recipe_checks import loss_problems_of, recipe_findings

RIGHT = {
    "workflow": "async def workflow(query, agents): return Rewards()",
    "train_query": "def train_query(position, seed, *, largest): return Query(f'q{position}', 'text', {'n': largest})",
    "eval_queries": "def eval_queries(seed, largest): return [Query('e', 'evaluation')]",
}
SIMULATED = {"engine": {"name": "simulated"}, "trainer": {"name": "simulated"}}


pytestmark = pytest.mark.usefixtures("forgotten_recipes")


def problems(folder: Path, settings: dict[str, Any] | None = None, /, **functions: str) -> list[str]:
    code = "\n".join({**RIGHT, **functions}.values())
    (folder / "workflow.py").write_text(
        f"from flexmarl.actors import Query, QuerySource, Rewards\n{dedent(code)}\n"
    )
    raw: dict[str, Any] = {
        "recipe": str(folder),
        "agents": {"solver": SIMULATED},
        "training": {"steps": 6, "queries_per_step": 4, "trajectories_per_query": 8, "micro_batch": 1},
        "data": {"largest": 9},
    }
    return recipe_findings(check({**raw, **(settings or {})}, "config")).problems


def test_a_right_recipe_has_none(tmp_path: Path) -> None:
    assert problems(tmp_path) == []


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        (
            {"workflow": "def workflow(query, agents): return Rewards()"},
            "workflow.py: workflow is not async: write `async def workflow(query, agents)`",
        ),
        (
            {"workflow": "async def workflow(query): return Rewards()"},
            "workflow.py: workflow takes too few arguments: write `async def workflow(query, agents)`",
        ),
        (
            {"workflow": "async def workflow(query, agents, judge): return Rewards()"},
            "workflow.py: workflow requires 'judge' too: write `async def workflow(query, agents)`",
        ),
        (
            {"train_query": "async def train_query(position, seed, largest): return Query('q', 'x')"},
            "workflow.py: train_query is async: write `def train_query(position, seed, **data)`",
        ),
        (
            {"train_query": "def train_query(position, seed, *, largst=1): return Query('q', 'x')"},
            "data.largest: train_query in workflow.py has no argument 'largest'; it takes: largst",
        ),
        (
            {"eval_queries": "def eval_queries(seed, *, largest, smallest): return []"},
            "data.smallest is missing: eval_queries in workflow.py requires it",
        ),
        (
            {"sft": "def sft(agent, batch, size): return []"},
            "workflow.py: sft takes too few arguments: write `def sft(agent, batch, size, seed, **data)`",
        ),
        (
            {"train_query": "def train_query(position, seed, **data): return {'id': 1}"},
            "workflow.py: train_query(0, seed) gives dict, not a Query",
        ),
        (
            {"train_query": "def train_query(position, seed, **data): return Query(1, 'x')"},
            "workflow.py: train_query(0, seed) gives Query(id=1, text='x', data={}): id and text must be strings, "
            "and data a dictionary",
        ),
        (
            {"eval_queries": "def eval_queries(seed, **data): return [Query('e', 'x'), Query('e', 'y')]"},
            "workflow.py: eval_queries gives two queries the id 'e'",
        ),
        (
            {"train_query": "def train_query(position, seed, **data): return Query('q', 'x')"},
            "workflow.py: step 1 has two queries with the id 'q': give each an id of its own, such as its position",
        ),
        (
            {
                "train_query": "def train_query(position, seed, **data): return Query(f'q{min(position, 21)}', 'x')"
            },
            "workflow.py: step 6 has two queries with the id 'q21': give each an id of its own, such as its position",
        ),
        (
            {"eval_queries": "def eval_queries(seed, **data): return [Query('e', 'x'), 'y']"},
            "workflow.py: query 1 of eval_queries gives str, not a Query",
        ),
    ],
)
def test_one_mistake_is_one_line(tmp_path: Path, functions: dict[str, str], words: str) -> None:
    assert problems(tmp_path, **functions) == [words]


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({}, True),
        ({"checks": {"trajectory": False}}, False),
        ({"training": {"steps": 0, "queries_per_step": 4, "trajectories_per_query": 8, "micro_batch": 1}}, False),
    ],
)  # fmt: skip
def test_training_data_that_differs_when_it_is_made_again(
    tmp_path: Path, settings: dict[str, Any], is_refused: bool
) -> None:
    code = "count = iter(range(99))\ndef train_query(position, seed, **data): return Query(f'q{next(count)}', 'x')"
    lines = problems(tmp_path, settings, train_query=code)
    assert len(lines) == is_refused
    for line in lines:
        assert line.startswith(
            "workflow.py: train_query(0, seed) gives another query when it is called again"
        )


SOURCE = """
class Source(QuerySource):
    def __init__(self): self.given = 0
    def next(self, step):
        self.given += 1
        return Query(f's{self.given}', 'evaluation')
    def state(self): return {'given': self.given}
    def restore(self, state): self.given = state['given']
def query_source(positions, seed, largest): return Source()
"""


def test_a_query_source_is_tried(tmp_path: Path) -> None:
    """It may stand without a train_query, and its queries are those that an evaluation is compared with."""
    assert problems(tmp_path, query_source=SOURCE, train_query="") == []
    held_out = problems(tmp_path, {"evaluation": {"held_out": True}}, query_source=SOURCE, train_query="")
    assert held_out == [
        "evaluation.held_out=true, but training query 's1' (position 0) is evaluation query 'e' too"
    ]


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        (
            "positions, seed, largest)",
            "positions, seed)",
            "data.largest: query_source in workflow.py has no argument",
        ),
        ("positions, seed, largest)", "positions)", "query_source takes too few arguments"),
        ("return Source()", "return 1", "workflow.py: query_source returns int, not a flexmarl.QuerySource"),
        ("{'given': self.given}", "{'given': {1}}", "Source.state must give a dictionary of plain data"),
        (
            "self.given = state['given']",
            "pass",
            "workflow.py: query_source: a source that was restored continues with the query 's1', which differs from "
            "the query 's5' that the other one gives",
        ),
    ],
)
def test_mistakes_of_a_query_source_are_named(tmp_path: Path, right: str, wrong: str, words: str) -> None:
    assert right in SOURCE
    (line,) = problems(tmp_path, query_source=SOURCE.replace(right, wrong))
    assert words in line


def test_all_signatures_are_checked_at_once(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        workflow="def workflow(query, agents): ...",
        train_query="def train_query(position): ...",
        eval_queries="eval_queries = lambda seed: []",
    )
    assert [line.split()[1] for line in found] == ["workflow", "train_query", "eval_queries"]


def test_decorated_and_callable_workflows_are_async_too(tmp_path: Path) -> None:
    wrapped = """
    import functools
    def logged(function):
        @functools.wraps(function)
        def call(*arguments): return function(*arguments)
        return call
    @logged
    async def workflow(query, agents): return Rewards()
    """
    called = """
    class Workflow:
        async def __call__(self, query, agents): return Rewards()
    workflow = Workflow()
    """
    for code in (wrapped, called, "async def workflow(*arguments): return Rewards()"):
        assert problems(tmp_path, workflow=dedent(code)) == []


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ({"workflow": "import nothing_like_this"}, "No module named 'nothing_like_this'"),
        ({"train_query": ""}, "defines no function 'train_query'"),
        (
            {"train_query": "def train_query(position, seed, **data): return TASKS[0]"},
            "name 'TASKS' is not defined",
        ),
    ],
)
def test_what_the_recipe_raises_is_shown_with_its_lines(
    tmp_path: Path, functions: dict[str, str], words: str
) -> None:
    (found,) = problems(tmp_path, **functions)
    assert words in found and "workflow.py" in found


def test_data_that_no_message_can_hold(tmp_path: Path) -> None:
    (found,) = problems(
        tmp_path, train_query="def train_query(position, seed, **data): return Query('q', 'x', {'f': open})"
    )
    assert found.startswith("workflow.py: train_query(0, seed) gives the query 'q', which can't be sent")


@pytest.mark.parametrize(
    "query", [r"Query('\ud83d', 'x')", r"Query('q', '\ud83d')", r"Query('q', 'x', {'a': ['\ud83d']})"]
)
def test_half_of_a_character_in_a_query(tmp_path: Path, query: str) -> None:
    (found,) = problems(tmp_path, train_query=f"def train_query(position, seed, **data): return {query}")
    assert found.startswith("workflow.py: train_query(0, seed) gives the query '")
    assert r"is '\ud83d': half of a surrogate pair" in found
    (found,) = problems(tmp_path, eval_queries=f"def eval_queries(seed, **data): return [{query}]")
    assert found.startswith("workflow.py: query 0 of eval_queries gives the query '")


def test_an_evaluation_that_is_declared_held_out_is_compared_with_the_first_step(tmp_path: Path) -> None:
    known = "def eval_queries(seed, **data): return [Query('e0', 'text', {'n': 9})]"
    declared = {"evaluation": {"held_out": True}}
    assert problems(tmp_path, eval_queries=known) == []
    assert problems(tmp_path, declared) == []
    assert problems(tmp_path, declared, eval_queries=known) == [
        "evaluation.held_out=true, but training query 'q0' (position 0) is evaluation query 'e0' too"
    ]


def test_supervised_batches(tmp_path: Path) -> None:
    wanted = {"agents": {"solver": {**SIMULATED, "sft": {"batches": 2}}}}
    assert problems(tmp_path, wanted) == ["policies.solver.sft.batches=2: workflow.py defines no sft"]
    right = "def sft(agent, batch, size, seed, **data): return [('a', 'b')] * size"
    assert problems(tmp_path, wanted, sft=right) == []
    texts = "def sft(agent, batch, size, seed, **data): return ['ab'] * size"
    assert problems(tmp_path, wanted, sft=texts) == [
        "workflow.py: sft gives 'ab' as example 0 of batch 0 for agent solver, not a pair of strings (prompt, "
        "completion), or messages"
    ]


ENVIRONMENT = """
from flexmarl.actors import Environment

class Game(Environment):
    async def setup(self, {data}): ...
    async def reset(self, query): return {{}}
    {step}

workflow = Game

async def setup(largest): ...
async def teardown(): ...
"""
STEP = "async def step(self, turns): return Rewards()"


def test_an_environment_is_a_workflow(tmp_path: Path) -> None:
    assert problems(tmp_path, workflow=ENVIRONMENT.format(data="largest", step=STEP)) == []


@pytest.mark.parametrize(
    ("data", "step", "problem"),
    [
        ("largest", "", "workflow.py: Game.step is missing: write `async def step(self, turns)`"),
        (
            "largest",
            STEP.removeprefix("async "),
            "workflow.py: Game.step is not async: write `async def step(self, turns)`",
        ),
        (
            "largest",
            "async def step(self): ...",
            "workflow.py: Game.step: too many positional arguments: write `async def step(self, turns)`",
        ),
        (
            "least",
            STEP,
            "data.largest: Game.setup in workflow.py has no argument 'largest'; it takes: least",
        ),
        (
            "**data",
            f"board = {{}}; {STEP}".replace("; async", "\n    async"),
            "workflow.py: Game.board is one dict for all trajectories: assign it in reset, or in setup if it is shared",
        ),
    ],
)
def test_mistakes_of_an_environment_are_named(tmp_path: Path, data: str, step: str, problem: str) -> None:
    assert problems(tmp_path, workflow=ENVIRONMENT.format(data=data, step=step)) == [problem]


@pytest.mark.parametrize(
    ("workflow", "found"),
    [
        (
            ENVIRONMENT.format(data="largest", step=STEP),
            ["rollout.tree: Game can't branch: define `async def fork"],
        ),
        (ENVIRONMENT.format(data="largest", step=f"replays = True\n    {STEP}"), []),
        (RIGHT["workflow"], ["rollout.tree needs an environment: the workflow is a function"]),
    ],
)
def test_a_workflow_that_cant_branch_is_refused_with_a_tree(
    tmp_path: Path, workflow: str, found: list[str]
) -> None:
    named = problems(tmp_path, {"rollout": {"tree": {"branch": "entropy"}}}, workflow=workflow)
    assert len(named) == len(found) and all(map(str.startswith, named, found))


@pytest.mark.parametrize(
    ("workflow", "line", "found"),
    [
        (RIGHT["workflow"], "", "rollout.demonstrations needs an environment: the workflow is a function"),
        (ENVIRONMENT.format(data="largest", step=STEP), "", "walks.jsonl has no demonstration"),
        (ENVIRONMENT.format(data="largest", step=STEP), "{}", "walks.jsonl, line 1: has no key"),
        (
            ENVIRONMENT.format(data="largest", step=STEP),
            '{"query": "text", "actions": {"solvr": ["a"]}}',
            "line 1: agent 'solvr' is not in the config; it has: solver; do you mean solver?",
        ),
        (
            ENVIRONMENT.format(data="largest", step=STEP),
            '{"query": "text", "actions": {"solver": ["a"]}}',
            None,
        ),
    ],
)
def test_demonstrations_that_cant_be_followed_are_refused(
    tmp_path: Path, workflow: str, line: str, found: str | None
) -> None:
    (tmp_path / "walks.jsonl").write_text(line)
    solver = {**SIMULATED, "algorithm": {"name": "at_grpo"}}
    settings = {"agents": {"solver": solver}, "rollout": {"demonstrations": {"file": "walks.jsonl"}}}
    named = problems(tmp_path, settings, workflow=workflow)
    assert len(named) == (found is not None) and all(str(found) in problem for problem in named)


def test_a_class_that_is_no_environment(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, workflow="class workflow: ...")
    assert "workflow is the class workflow, which is not derived from flexmarl.actors.Environment" in problem


def test_setup_and_teardown_are_checked(tmp_path: Path) -> None:
    assert problems(tmp_path, setup="def setup(**data): ...", teardown="async def teardown(what): ...") == [
        "workflow.py: setup is not async: write `async def setup(**data)`",
        "workflow.py: teardown requires 'what' too: write `async def teardown()`",
    ]


@pytest.mark.parametrize(
    ("rule", "code", "problem"),
    [
        ("pfsp", "", None),
        ("fair", "def fair(members, power=2.0): return [power for member in members]", None),
        ("unform", "", "neither one of uniform, latest, pfsp, nash nor a function in workflow.py"),
        ("fair", "fair = 3", "neither one of uniform, latest, pfsp, nash nor a function in workflow.py"),
        (
            "fair",
            "def fair(): return []",
            "workflow.py: fair takes too few arguments: write `def fair(members)`",
        ),
        ("fair", "def fair(members, seed): ...", "requires 'seed' too: write `def fair(members)`"),
        ("fair", "async def fair(members): ...", "it is async: write `def fair(members)`"),
        ("fair", "def fair(members): return [1.0]", "gives the weights [1.0] for 2 members"),
        (
            "fair",
            "def fair(members): return members[0].strength",
            "it raises AttributeError: 'Member' object",
        ),
        ("fair", "def fair(members): ...", "it raises TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_the_rule_of_a_pool_is_tried(tmp_path: Path, rule: str, code: str, problem: str | None) -> None:
    rival = {"policy": {"pool_of": "solver", "every": 1, "rule": rule}}
    found = problems(tmp_path, {"agents": {"solver": SIMULATED, "rival": rival}}, rule=code)
    if problem is None:
        assert found == []
    else:
        (line,) = found
        assert line.startswith("policies.rival.pool_of.rule") and problem in line


LOSSES = """
def right(inputs): return -inputs.advantages * inputs.logprobs
def summed(inputs): return right(inputs).sum()
"""


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        ("losses.py:right", []),
        (
            "losses.py:summed",
            ["loss losses.py:summed returns a tensor [], not one loss for each of 7 tokens"],
        ),
        ("losses.py:missing", ["losses.py has no function 'missing'"]),
        ("nowhere.py:right", ["nowhere.py does not exist"]),
    ],
)
def test_a_loss_of_the_users_own_is_tried(tmp_path: Path, loss: str, found: list[str]) -> None:
    (tmp_path / "losses.py").write_text(LOSSES)
    assert problems(tmp_path) == []
    agent = {**SIMULATED, "algorithm": {"loss": loss}}
    config = check(
        {
            "recipe": str(tmp_path),
            "agents": {"solver": agent},
            "training": {"steps": 6, "queries_per_step": 4, "trajectories_per_query": 8, "micro_batch": 1},
        },
        "config",
    )
    lines = list(loss_problems_of(config))
    assert len(lines) == len(found)
    for line, words in zip(lines, found, strict=True):
        assert line.startswith(f"policies.solver.algorithm.loss={loss}: ") and words in line
