"""A trajectory that is played before the start: what refuses the run, what is a warning, and what is neither."""

from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from flexmarl.launch.config.config_reading import check
from flexmarl.launch.run.preflight.recipe_checks import recipe_findings
from flexmarl.launch.run.preflight.trial import play_trial
from flexmarl.launch.run.preflight.trial_findings import Trial

from ....actors.chat.chat_tokenizer import CHATML, FAILING, VOCABULARY, chat_tokenizer

RECIPE = """
import asyncio
from flexmarl.actors import Environment, Query, Rewards
from flexmarl.actors.errors import LimitReached, PromptTooLong

def question(position):
    return "a question " * 3

{workflow}

def train_query(position, seed, **data):
    return Query(f"q{{position}}", question(position), {{"answer": "x"}})

def eval_queries(seed, **data):
    return [Query("e0", "an evaluation")]
"""
MODEL = {
    "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512,
}  # fmt: skip
SIMULATED = {"engine": {"name": "simulated"}, "trainer": {"name": "simulated"}}


pytestmark = pytest.mark.usefixtures("forgotten_recipes")


def play(
    folder: Path, body: str, settings: dict[str, Any] | None = None, /, **agents: dict[str, Any]
) -> Trial:
    """``body``: of the workflow, or a whole one. ``agents``: with their settings; by default one, a solver."""
    is_whole = "workflow" in body
    workflow = body if is_whole else f"async def workflow(query, agents):\n{indent(dedent(body), '    ')}"
    (folder / "recipe").mkdir()
    (folder / "trial").mkdir(mode=0o700)
    (folder / "recipe" / "workflow.py").write_text(RECIPE.format(workflow=dedent(workflow)))
    raw: dict[str, Any] = {
        "recipe": str(folder / "recipe"),
        "agents": {
            name: of if "model" in of else SIMULATED | of for name, of in (agents or {"solver": {}}).items()
        },
        "training": {"steps": 1, "queries_per_step": 4, "trajectories_per_query": 8, "micro_batch": 1},
    }
    config = check({**raw, **(settings or {})}, "config")
    findings = recipe_findings(config)
    assert findings.recipe is not None and not findings.problems, findings.problems
    training = [*findings.training, *findings.further]
    return play_trial(config, findings.recipe, training, findings.evaluation, folder / "trial")


TURN = 'turn = await agents["solver"].generate(query.text)\n'
FULL = {"engine": {"name": "simulated", "max_context": 512}}
OF_TURNS = {"algorithm": {"rewards": "turn"}}
JUDGED = {
    "columns": {"reward": {"type": "float", "required": True, "written_by": "external", "timeout_s": 600}}
}
RIGHT = f"{TURN}return Rewards(solver=1.0)"


@pytest.mark.parametrize(
    ("body", "agent", "words"),
    [
        (f"{TURN}return Rewards()", {}, "the workflow used agent 'solver' and returned no reward for it"),
        (f"{TURN}return Rewards(solver=None)", {}, "reward of 'solver' is None: it must be a finite number"),
        (f"{TURN}return Rewards(solver=1.0, metrics={{'a': 'high'}})", {}, "metric 'a' is 'high'"),
        (f"{TURN}return 1.0", {}, "the workflow returned float, not Rewards"),
        (TURN, {}, "the workflow returned NoneType, not Rewards"),
        (f"{TURN}return Rewards(solver=1.0, solverr=1.0)", {}, "rewards agent 'solverr', which the config lacks"),
        (f"{TURN}return Rewards().of(turn, 1.0)", {}, "set agents.solver.algorithm.rewards to both or turn"),
        ("await agents['critic'].generate('x')", {}, "asks for agent 'critic', which the config lacks"),
        ("agents['solver'].generate('x').text", {}, "object has no attribute 'text': write `await` before the call"),
        (RIGHT, FULL | {"sampling": {"max_new_tokens": 600}}, "lower agents.solver.sampling.max_new_tokens=600"),
        ("await agents['solver'].generate('x' * 999)", FULL, "exceed the engine's context of 512 tokens"),
        ("await agents['solver'].generate('x', max_tokens=5)", {}, "generate has no argument 'max_tokens'"),
        ("await agents['solver'].generate('x', temperature=0)", {}, "temperature is 0 in a training step"),
        (f"{TURN}turn.write(plan='x')", {}, "agent solver has no column 'plan'"),
        (
            """
            def add(a: int): ...
            messages = [{"role": "user", "content": "1 + 1"}]
            await agents["solver"].generate(messages, tools=[add])
            """,
            {},
            "the tool add is not an async function",
        ),
        (
            """
            class Game(Environment):
                async def reset(self, query): return None
                async def step(self, turns): return Rewards()
            workflow = Game
            """,
            {},
            "Game.reset returned NoneType: needs prompts by agent, or Rewards",
        ),
    ],
)  # fmt: skip
def test_certain_mistakes_refuse_the_run(
    tmp_path: Path, body: str, agent: dict[str, Any], words: str
) -> None:
    trial = play(tmp_path, body, solver=agent)
    assert len(trial.problems) == 1 and words in trial.problems[0] and trial.warnings == []
    assert trial.problems[0].startswith("workflow.py:") and "checks.trajectory=false" in trial.problems[0]


@pytest.mark.parametrize(
    ("body", "agent", "words"),
    [
        (f"{TURN}return Rewards(solver=int(turn.text))", {}, "ValueError: invalid literal for int()"),
        (f"{TURN}return Rewards(solver=query.data[turn.text])", {}, "KeyError"),
        (f"{TURN}await agents['solver'].generate([])", {}, "the prompt is an empty list"),
        (f"while True:\n    {TURN}", {"sampling": {"trajectory_turns": 3}}, "trajectory_turns=3; catch LimitReached"),
        (f"query.data['answr']\n{TURN}", {}, "query.data['answr']: KeyError: 'answr' (4 of 4 trajectories"),
        (f"open('here.txt')\n{TURN}", {}, "No such file or directory: 'here.txt'; the try runs in an empty"),
        (f"{TURN}raise SystemExit(3)", {}, "raise SystemExit(3): its process ends"),
        (f"{TURN}if query.id == 'q0': raise OSError('once')\nreturn Rewards(solver=1.0)", {}, "1 of 2 trajectories"),
        (f"{TURN}return Rewards(solver=float('nan'))", {}, "reward of 'solver' is nan"),
        (f"{TURN}return Rewards(solver=__import__('numpy').float64('-inf'))", {}, "is np.float64(-inf)"),
        (RIGHT, OF_TURNS, "none of its turns: that one trains nothing"),
        (f"agents['solver'].generate('x')\n{RIGHT}", {}, "was never awaited: write `await` before the call"),
        ("return Rewards()", {}, "asked no agent for a turn with the query 'q0'"),
        (
            """
            async def add(a): ...
            messages = [{"role": "user", "content": "1 + 1"}]
            await agents["solver"].generate(messages, tools=[add])
            return Rewards(solver=1.0)
            """,
            {},
            "the tool add has no type for its parameter 'a'",
        ),
        (
            """
            async def setup(): open("names.txt")
            async def workflow(query, agents): ...
            """,
            {},
            "'names.txt'; the try runs in an empty temporary folder",
        ),
        (
            """
            async def setup(): raise ValueError("no GPU here")
            async def workflow(query, agents): ...
            """,
            {},
            "setup failed: ValueError: no GPU here",
        ),
        (
            """
            async def teardown(): raise ValueError("still busy")
            async def workflow(query, agents):
                await agents["solver"].generate("x")
                return Rewards(solver=1.0)
            """,
            {},
            "teardown failed: ValueError: still busy",
        ),
    ],
)  # fmt: skip
def test_what_may_come_of_random_answers_or_of_the_machine_is_a_warning(
    tmp_path: Path, body: str, agent: dict[str, Any], words: str
) -> None:
    trial = play(tmp_path, body, solver=agent)
    assert trial.problems == []
    assert len(trial.warnings) == 1 and words in trial.warnings[0]


@pytest.mark.parametrize(
    ("body", "agents"),
    [
        (RIGHT, {}),
        (TURN, {"solver": JUDGED}),
        (TURN, {"solver": JUDGED | OF_TURNS}),
        (f"{TURN}return Rewards().of(turn, 1.0)", {"solver": OF_TURNS}),
        (
            """
            turns = await asyncio.gather(*(agents[name].generate(query.text) for name in ("solver", "judge")))
            await agents["judge"].generate([turns[0], " and ", turns[1]])
            return Rewards(solver=1.0).of_team(1.0)
            """,
            {"solver": {}, "judge": {}},
        ),
        (
            """
            tools = [
                {"type": "function", "function": {"name": "now"}},
                {"type": "function", "function": {"name": "say", "parameters": {"properties": {"text": True}}}},
            ]
            await agents["solver"].generate([{"role": "user", "content": "1 + 1"}], tools=tools)
            return Rewards(solver=1.0)
            """,
            {"solver": {}},
        ),
        (
            """
            try:
                await agents["solver"].generate("x" * 999)
            except PromptTooLong:
                await agents["solver"].generate("x")
            return Rewards(solver=1.0)
            """,
            {"solver": FULL},
        ),
        (
            """
            class Game(Environment):
                async def reset(self, query): return {"solver": "go", "judge": "go"}
                async def step(self, turns): return Rewards(solver=1.0, judge=0.0)
            workflow = Game
            """,
            {"solver": {}, "judge": {}},
        ),
    ],
)
def test_a_right_workflow_has_no_findings(tmp_path: Path, body: str, agents: dict[str, Any]) -> None:
    assert play(tmp_path, body, **agents) == Trial()


def test_a_workflow_that_hangs_is_a_warning_with_its_line(tmp_path: Path) -> None:
    settings = {"checks": {"trajectory_timeout_s": 5.0}}
    trial = play(tmp_path, f"{TURN}await asyncio.Event().wait()", settings)
    (warning,) = trial.warnings
    assert not trial.problems and "checks.trajectory_timeout_s=5; it stood at workflow.py:" in warning
    assert "await asyncio.Event().wait()" in warning


def test_files_of_the_workflow_stay_in_the_folder_of_the_trial(tmp_path: Path) -> None:
    here = Path.cwd()
    assert play(tmp_path, f"open('notes.txt', 'w').close()\n{RIGHT}") == Trial()
    assert (tmp_path / "trial" / "work" / "notes.txt").exists()
    assert Path.cwd() == here and not Path("notes.txt").exists()


def test_a_run_without_steps_plays_the_evaluation_alone(tmp_path: Path) -> None:
    settings = {
        "training": {"steps": 0, "queries_per_step": 4, "trajectories_per_query": 8, "micro_batch": 1}
    }
    body = f"assert query.id == 'e0'\n{RIGHT}"
    assert play(tmp_path, body, settings) == Trial()


@pytest.mark.parametrize(
    ("role", "template", "words"),
    [
        ("system", CHATML, None),
        ("user", FAILING, None),
        ("system", FAILING, "the chat template of {tokenizer} failed: TemplateError: no system role"),
        ("user", None, "the tokenizer {tokenizer} has no chat template"),
    ],
)
def test_a_conversation_goes_through_the_models_own_template(
    tmp_path: Path, role: str, template: str | None, words: str | None
) -> None:
    tokenizer = tmp_path / "tokenizer"
    chat_tokenizer(template).save_pretrained(tokenizer)
    body = f"""
        async def add(a: int): ...
        solver = agents["solver"]
        turn = await solver.generate([{{"role": "{role}", "content": query.text}}], tools=[add])
        for _ in range(2):
            turn = await solver.generate([turn, {{"role": "tool", "content": "1"}}], tools=[add])
        return Rewards(solver=1.0)
    """
    model = {"model": {"config": MODEL, "tokenizer": str(tokenizer)}, "sampling": {"max_new_tokens": 32}}
    trial = play(tmp_path, body, solver=model)
    assert trial.warnings == [] and len(trial.problems) == (words is not None)
    assert words is None or words.format(tokenizer=tokenizer) in trial.problems[0]


def test_prompts_are_measured_in_the_models_own_tokens(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    chat_tokenizer().save_pretrained(tokenizer)
    model = {"model": {"config": MODEL, "tokenizer": str(tokenizer)}, "sampling": {"max_new_tokens": 500}}
    (problem,) = play(tmp_path, RIGHT, solver=model).problems
    assert "33 prompt tokens + 500 new ones exceed the engine's context of 512 tokens" in problem


LENGTHS = """
def question(position):
    return "x" * (300 if position < {short} else 300 + position)

async def workflow(query, agents):
    turn = await agents["solver"].generate(query.text)
    return Rewards(solver=1.0)
"""


@pytest.mark.parametrize(("short", "are_refused"), [(75, False), (74, True), (0, True)])
def test_queries_of_later_steps_with_long_prompts_are_counted_before_the_start(
    tmp_path: Path, short: int, are_refused: bool
) -> None:
    """100 queries, of which up to 25 % may fail. Those from the position ``short`` on, or the second, are too long."""
    settings = {
        "training": {"steps": 25, "queries_per_step": 4, "trajectories_per_query": 8, "micro_batch": 1}
    }
    agent = FULL | {"sampling": {"max_new_tokens": 512 - 300 - max(short, 1) + 1}}
    body = LENGTHS.replace("{short}", str(short))
    trial = play(tmp_path, body, settings, solver=agent)
    said = trial.problems if are_refused else trial.warnings
    assert [len(trial.problems), len(trial.warnings)] == ([1, 0] if are_refused else [0, 1])
    assert (
        f"399 prompt tokens + {agent['sampling']['max_new_tokens']} new ones exceed the engine's context"
        in said[0]
    )
    assert (
        f"({100 - max(short, 1)} of the 100 training queries that were measured have such prompts" in said[0]
    )


def test_a_training_query_of_a_later_step_that_can_not_be_made_refuses_the_run(tmp_path: Path) -> None:
    (tmp_path / "workflow.py").write_text(
        RECIPE.format(workflow="async def workflow(query, agents): ...").replace(
            "return Query(f", "return [Query('a', ''), Query('b', '')][position] if position < 5 else Query(f"
        )
    )
    raw = {
        "recipe": str(tmp_path), "agents": {"solver": SIMULATED},
        "training": {"steps": 3, "queries_per_step": 2, "trajectories_per_query": 2, "micro_batch": 1},
    }  # fmt: skip
    (problem,) = recipe_findings(check(raw, "config")).problems
    assert problem.startswith("train_query(2, seed), a query of step 2: ") and "IndexError" in problem
