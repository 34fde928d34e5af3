"""Pools of past versions: in the config, and in runs that are stopped, killed and resumed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from flexmarl.actors.errors import ConfigError
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.core.errors import ActorFailed
from flexmarl.launch.config.config_reading import check, resolve, to_yaml
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.run import resuming
from flexmarl.launch.simulate.simulated_faults import FaultKind, FaultPlan
from flexmarl.launch.simulate.simulation import Simulation, simulate

RECIPE = Path(__file__).parent / "recipes" / "self_play"
RIVAL = PolicyName("rival")
POOL = "agents.rival={policy: {pool_of: player, every: 1, size: 2, rule: pfsp}}"
LEAGUE = (
    "agents.rival={policy: {pool_of: player, exploiters: [spy], every: 1, size: 6, rule: nash, matches: 2}}"
)
EXPLOITER = {
    "spy": {},
    "prey": {"policy": {"pool_of": "player", "against": "spy", "every": 1, "rule": "latest"}},
}
"""The agents of an exploiter's own games: it is trained against the newest player."""


def game(*overrides: str, recipe: Path = RECIPE) -> RunConfig:
    return resolve(str(recipe), overrides)


# --------------------------------------------------------------------------- the config


def test_a_pool_has_the_model_and_the_engine_of_its_policy() -> None:
    config = game("agents.rival={policy: {pool_of: player, every: 5}, instances: 2, engine: {max_batch: 4}}")
    pool, player = config.policies[RIVAL], config.policies[PolicyName("player")]
    assert not pool.train and pool.pool_of is not None and pool.instances == 2
    assert (pool.pool_of.policy, pool.pool_of.every, pool.pool_of.rule) == ("player", 5, "uniform")
    assert pool.model == player.model and pool.simulated
    assert pool.engine == player.engine.model_copy(update={"max_batch": 4})
    assert config.against(AgentName("rival")) == ("player",) and config.against(AgentName("player")) == ()
    assert check(yaml.safe_load(to_yaml(config)), "again") == config


def test_a_policy_at_a_step_is_a_pool_of_one_version() -> None:
    pool = game("agents.rival={policy: player@7}").policies[RIVAL].pool_of
    assert pool is not None and (pool.policy, pool.only) == ("player", 7)
    assert [step for step in range(20) if pool.joins_after(step)] == [0, 7]


def test_a_pool_may_be_written_in_the_section_policies() -> None:
    config = game("policies={past: {pool_of: {policy: player}}}", "agents.rival={policy: past}")
    assert config.policies[PolicyName("past")].pool_of is not None
    assert check(yaml.safe_load(to_yaml(config)), "again") == config


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        (["agents.rival={policy: {pool_of: plyer}}"], r"agents\.rival\.policy\.pool_of='plyer': there is no such"),
        (["agents.rival={policy: missing@3}"], r"agents\.rival\.policy='missing': there is no such policy"),
        (
            ["policies={past: {pool_of: {policy: plyer}}}", "agents.rival={policy: past}"],
            r"policies\.past\.pool_of\.policy='plyer': there is no such policy",
        ),
        ([POOL, "mode=async"], r"agents\.rival\.policy: one member plays a whole step, and under mode=async"),
        (
            ["agents={player: {}, rival: {train: false}, past: {policy: {pool_of: rival}}}"],
            r"agents\.past\.policy\.pool_of='rival': that policy is frozen itself",
        ),
        (
            ["agents.rival={policy: {pool_of: player}, optimizer: {lr: 1.0}}"],
            r"agents\.rival: optimizer is for policies that are trained, and past versions are not",
        ),
        (
            ["agents={player: {}, rival: {policy: {pool_of: past}}, past: {policy: {pool_of: rival}}}"],
            r"agents\.rival\.policy\.pool_of='past': that policy is frozen itself",
        ),
        (["agents.rival={policy: {pool_of: player}, model: {path: x}}"], r"leave model and lora out"),
        (["agents.rival={policy: {pool_of: player, every: 0}}"], r"agents\.rival\.policy\.every=0"),
        (
            ["agents.rival={policy: {pool_of: player, evry: 2}}"],
            r"agents\.rival\.policy\.evry: there is no .* allowed: pool_of, exploiters",
        ),
        (
            ["agents.rival={policy: {pool_of: player, only: 3, rule: latest}}"],
            r"only=3 has one member, and no draw: leave out rule",
        ),
        (
            ["agents.rival={policy: {pool_of: player, size: 1, rule: nash}}"],
            r"agents\.rival\.policy: size=1: a league without members: rule=nash with 0 exploiters needs at least 2",
        ),
        (
            ["agents={player: {}, spy: {}, rival: {policy: {pool_of: player, exploiters: [spy], size: 1}}}"],
            r"size=1: a league without members: rule=uniform with 1 exploiters needs at least 2",
        ),
        (
            ["agents={player: {}, spy: {}, rival: {policy: {pool_of: player, exploiters: [spy, spy]}}}"],
            r"exploiters=\['spy', 'spy'\]: name each policy once, and not 'player' itself",
        ),
        (
            ["agents.rival={policy: {pool_of: player, every: 4, matches: 1}}", "evaluation.every=3"],
            r"matches=1: matches are played at evaluations, .* write evaluation\.every=4",
        ),
        (
            ["agents.rival={policy: {pool_of: player, exploiters: [sspy]}}"],
            r"agents\.rival\.policy\.exploiters='sspy': there is no such policy; there are: player, rival",
        ),
        (
            ["agents={player: {}, rival: {policy: {pool_of: player, exploiters: [judge]}}, judge: {train: false}}"],
            r"exploiters='judge': that policy is frozen itself",
        ),
        (
            ["agents={player: {}, rival: {policy: {pool_of: player, against: judge}}, judge: {train: false}}"],
            r"against='judge': that policy is frozen itself",
        ),
        (
            ["agents.rival={policy: {pool_of: player}, train: true}"],
            r"agents\.rival: train=true: past versions are not trained",
        ),
    ],
)  # fmt: skip
def test_a_mistake_about_a_pool_is_refused_by_name(settings: list[str], refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        game(*settings)


# --------------------------------------------------------------------------- runs


@dataclass
class Played:
    """A run, as its files have it."""

    made: Simulation

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The last line of each step."""
        lines = [json.loads(line) for line in self.made.directory.metrics.read_text().splitlines()]
        return [*{line["step"]: line for line in lines}.values()]

    @property
    def draws(self) -> list[tuple[int, int, int]]:
        """Step, the member's step and version of the last draw of ``rival`` for each step."""
        lines = [json.loads(line) for line in self.made.directory.events.read_text().splitlines()]
        draws = [line for line in lines if line["event"] == "opponent_drawn" and line["policy"] == "rival"]
        drawn = {line["step"]: line for line in draws}
        steps = {step: int(line["member"].split("@")[1]) for step, line in drawn.items()}
        return [(step, steps[step], drawn[step]["version"]) for step in sorted(drawn)]

    @property
    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.made.directory.opponents / "rival.json").read_text())
        return found

    def weights(self, step: int) -> list[int]:
        """Version and digest of a member."""
        file = self.made.directory.opponents / "rival" / f"player-step_{step:06d}.safetensors"
        return [int(number) for number in load_file(file)["state"]]


def played(tmp_path: Path, *overrides: str, recipe: Path = RECIPE) -> Played:
    config = game(*overrides, recipe=recipe)
    made = simulate(config, tmp_path / "run", 1, hosts=2)
    assert made.result is not None and made.result.last_step == config.training.steps
    return Played(made)


@pytest.mark.parametrize(
    "settings", [(), ("mode=sync",), ("pool={name: shared, slots: 1}",)], ids=["strict", "sync", "shared"]
)
def test_the_latest_member_is_the_policy_itself(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """Every step has a version of its own: the weights that the player had after the step before."""
    pool = "agents.rival={policy: {pool_of: player, every: 1, rule: latest}}"
    run = played(tmp_path, pool, "training.steps=5", *settings)
    assert [(step, member) for step, member, _ in run.draws] == [(n, n - 1) for n in range(1, 6)]
    assert [run.weights(step)[0] for step in range(5)] == [0, 1, 2, 3, 4]
    assert len({run.weights(step)[1] for step in range(5)}) == 5
    assert [step["opponent_step/rival"] for step in run.steps] == [0, 1, 2, 3, 4]
    assert [step["opponent_games/rival"] for step in run.steps] == [6] * 5
    assert [step["versions"] for step in run.steps] == [{"player": n} for n in range(1, 6)]


def test_results_are_in_metrics_and_in_the_folder(tmp_path: Path) -> None:
    run = played(tmp_path, "agents.rival={policy: {pool_of: player, every: 2}}", "training.steps=6")
    for step in run.steps:
        assert step["opponent_payoff/rival"] == pytest.approx(step["reward/player"])
        assert step["opponent_score/rival"] == pytest.approx((step["reward/player"] + 1) / 2)
    results = run.results
    assert [member["step"] for member in results["members"]] == [0, 2, 4]
    assert results["elo"] == run.steps[-1]["elo/rival"] and results["policy"] == "player"
    assert sum(cell["games"] for cell in results["payoffs"]) == 36
    rows = [0, 0, 2, 2, 4, 4]  # the newest member when each step was played
    for row, step in zip(rows, run.steps, strict=True):
        cell = (f"player@{row}", f"player@{step['opponent_step/rival']}")
        assert cell in {(c["row"], c["column"]) for c in results["payoffs"]}


def test_a_policy_at_a_step_plays_from_then_on(tmp_path: Path) -> None:
    run = played(tmp_path, "agents.rival={policy: player@2}", "training.steps=5")
    assert [member for _, member, _ in run.draws] == [0, 0, 2, 2, 2]
    assert [version for _, _, version in run.draws] == [1, 1, 2, 2, 2], "the same weights are published once"
    assert run.weights(2)[0] == 2


def test_members_that_left_leave_no_files(tmp_path: Path) -> None:
    pool = "agents.rival={policy: {pool_of: player, every: 1, size: 2}}"
    run = played(tmp_path, pool, "training.steps=12")
    files = {path.name for path in (run.made.directory.opponents / "rival").iterdir()}
    assert len(run.results["members"]) == 2 and len(files) <= 6, "those of the last checkpoints too"
    assert {f"player-step_{member['step']:06d}.safetensors" for member in run.results["members"]} <= files


def test_a_rule_may_be_a_function_of_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    (recipe / "config.yaml").write_text((RECIPE / "config.yaml").read_text())
    rule = "\n\ndef oldest(members):\n    return [1.0] + [0.0] * (len(members) - 1)\n"
    (recipe / "workflow.py").write_text((RECIPE / "workflow.py").read_text() + rule)
    pool = "agents.rival={policy: {pool_of: player, every: 1, rule: %s}}"
    run = played(tmp_path, pool % "oldest", "training.steps=4", recipe=recipe)
    assert [member for _, member, _ in run.draws] == [0, 0, 0, 0]
    with pytest.raises(ActorFailed, match="RecipeError.* defines no function 'oldst'"):
        simulate(game(pool % "oldst", recipe=recipe), tmp_path / "other", 1)


def test_an_exploiter_joins_the_league_and_plays_its_own_games(tmp_path: Path) -> None:
    recipe = league_recipe(tmp_path)
    run = played(tmp_path, LEAGUE, "training.steps=6", "evaluation.every=1", recipe=recipe)
    assert [member["policy"] for member in run.results["members"]] == ["spy", "player"] * 3
    assert [member["step"] for member in run.results["members"]] == [4, 4, 5, 5, 6, 6]
    assert len(run.results["mixture"]) == 6 and sum(run.results["mixture"]) == pytest.approx(1.0)
    for cell in run.results["payoffs"]:
        assert cell["row"].startswith("player@") and cell["reward"] == -cell["against"]
        assert cell["games"] == 2, "one evaluation query is the player's, and is played twice"
    pairs = {(cell["row"], cell["column"]) for cell in run.results["payoffs"]}
    newer = [(row, column) for row in (5, 6) for column in range(4, row)]
    assert pairs >= {
        (f"player@{row}", f"{policy}@{step}") for policy in ("player", "spy") for row, step in newer
    }
    assert {(f"player@{step}", f"spy@{step}") for step in (4, 5, 6)} <= pairs, (
        "those that join at the same step"
    )
    prey = json.loads((run.made.directory.opponents / "prey.json").read_text())
    assert {cell["row"].split("@")[0] for cell in prey["payoffs"]} == {"spy"}
    for step in run.steps:
        assert step["opponent_payoff/rival"] == pytest.approx(step["reward/player"])
        assert step["opponent_payoff/prey"] == pytest.approx(step["reward/spy"])
        assert step["opponent_gap/rival"] >= 0.0 and "opponent_gap/prey" not in step
    assert run.steps[-1]["versions"] == {"player": 6, "spy": 6}
    weights = load_file(run.made.directory.opponents / "rival" / "spy-step_000005.safetensors")
    assert [int(number) for number in weights["state"]] != run.weights(5), "not those of the player"


def league_recipe(tmp_path: Path) -> Path:
    """The game of ``self_play``, and beside it the same game between an exploiter and its prey."""
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    config = yaml.safe_load((RECIPE / "config.yaml").read_text())
    config["agents"] |= EXPLOITER
    (recipe / "config.yaml").write_text(yaml.safe_dump(config))
    game_of = (RECIPE / "workflow.py").read_text()
    one, two = 'for name in ("player", "rival"))', "return Rewards(player=won, rival=-won, "
    assert game_of.count(one) == game_of.count(two) == 1
    sides = '("player", "rival") if int(query.id[1:]) % 2 else ("spy", "prey")'
    game_of = game_of.replace(one, f"for name in ({sides}))")
    game_of = game_of.replace(two, f"return Rewards(**dict(zip({sides}, (won, -won))), ")
    (recipe / "workflow.py").write_text(game_of)
    return recipe


@pytest.mark.parametrize("pool", [POOL, LEAGUE], ids=["pool", "league"])
@pytest.mark.parametrize("seed", range(2))
def test_a_run_that_is_resumed_repeats_the_draws_and_the_results(
    tmp_path: Path, seed: int, pool: str
) -> None:
    """The orchestrator or the trainer dies several times; the run continues from its newest checkpoint."""
    recipe = RECIPE if pool == POOL else league_recipe(tmp_path)
    settings = [
        pool, f"seed={seed}", "evaluation.every=1", "training.steps=8", "deterministic=true",
        "supervision.heartbeat_s=0.2",
        "supervision.missed_heartbeats=2", "supervision.max_restarts=100", "rollout.turn_retries=100",
    ]  # fmt: skip
    config = game(*settings, recipe=recipe)
    whole = Played(simulate(config, tmp_path / "whole", 1, hosts=2))
    kills = FaultPlan(every_s=0.7, most=4, kinds={FaultKind.FATAL_KILL: 1.0}).draw(seed)
    killed = Played(simulate(config, tmp_path / "killed", 1, hosts=2, planned_faults=kills))
    assert killed.made.attempts > 2
    assert killed.draws == whole.draws and len(whole.draws) == 8
    assert killed.results == whole.results
    keys = ("opponent_step/rival", "opponent_score/rival", "opponent_elo/rival", "elo/rival", "loss/player")
    assert [[step.get(key) for key in keys] for step in killed.steps] == [
        [step.get(key) for key in keys] for step in whole.steps
    ]
    assert resuming.plan_resume(killed.made.directory, (), ()).is_complete
