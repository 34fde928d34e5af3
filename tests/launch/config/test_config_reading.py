"""A recipe's YAML and the command line's overrides, and the config that comes of them."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from flexmarl.actors.columns.declared_columns import Column
from flexmarl.actors.errors import ConfigError
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.launch.config import config_reading as config_module
from flexmarl.launch.config.config_reading import check, read_yaml, resolve, to_yaml
from flexmarl.launch.config.config_warnings import warnings_about
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.run.role_setups import orchestrator_plan, policy_setups

from ..conftest import TINY

SOLVER, CHECKER = PolicyName("solver"), PolicyName("checker")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A copy of the tiny recipe, to be changed."""
    return shutil.copytree(TINY, tmp_path / "my-recipe")


def change(recipe: Path, **sections: Any) -> None:
    file = recipe / "config.yaml"
    file.write_text(yaml.safe_dump({**read_yaml(file), **sections}))


class TestResolving:
    def test_an_alias_of_yaml_is_a_value_of_its_own(self, recipe: Path) -> None:
        file = recipe / "config.yaml"
        config = yaml.safe_load(file.read_text())
        config["agents"]["checker"] = config["agents"]["solver"] = {"instances": 1}
        file.write_text(yaml.safe_dump(config))
        assert "*" in file.read_text(), "it has an alias"
        policies = resolve(str(recipe), ["agents.checker.instances=2"]).policies
        assert (policies[SOLVER].instances, policies[CHECKER].instances) == (1, 2)

    def test_agents_get_the_defaults_and_say_what_differs(self, recipe: Path) -> None:
        change(recipe, agents={"solver": {"sampling": {"temperature": 0.5}}, "checker": None})
        config = resolve(str(recipe), ["agents.checker.instances=2", "agent_defaults.optimizer.lr=3e-4"])
        solver, checker = config.agents[AgentName("solver")], config.agents[AgentName("checker")]
        assert (solver.sampling.temperature, solver.sampling.max_new_tokens) == (0.5, 3)
        assert checker.sampling.temperature == 1.0
        assert config.policies[CHECKER].instances == 2
        assert config.policies[SOLVER].optimizer.lr == config.policies[CHECKER].optimizer.lr == 3e-4

    def test_paths_within_the_recipe_are_made_absolute(
        self, recipe: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(recipe.parent)
        (recipe.parent / "words").mkdir()
        overrides = ["agents.solver.model={path: some/hub-name, config: null, tokenizer: words}"]
        config = resolve("my-recipe", overrides)
        assert config.recipe == str(recipe)
        assert config.policies[SOLVER].real_model.tokenizer == str(recipe.parent / "words")
        assert config.policies[CHECKER].real_model.tokenizer == str(recipe / "tokenizer")
        assert config.policies[SOLVER].real_model.path == "some/hub-name"

    def test_staleness_is_one_version_under_async_unless_said(self) -> None:
        assert orchestrator_plan(resolve(str(TINY), [])).max_staleness == 0
        config = resolve(str(TINY), ["mode=async", "agents.solver.global_batch=6"])
        assert orchestrator_plan(config).max_staleness == 1 and orchestrator_plan(config).global_batch == {
            "solver": 6
        }
        assert {policy.max_staleness for policy in policy_setups(config).values()} == {1}
        assert orchestrator_plan(resolve(str(TINY), ["mode=async", "max_staleness=3"])).max_staleness == 3

    def test_a_policy_that_cannot_stream_waits_for_its_whole_step(self) -> None:
        config = resolve(str(TINY), ["agents.solver.algorithm.name=reinforce_pp"])
        assert orchestrator_plan(config).whole_step == ("solver",)
        assert "solver: reinforce_pp can't train" in warnings_about(config)[0]

    def test_policies_that_need_not_take_turns_have_one_joined_computation_under_way(self) -> None:
        for pool, count in (
            ("{name: static}", 3),
            ("{name: shared, slots: 1}", 3),
            ("{name: shared, slots: 2}", 1),
        ):
            assert orchestrator_plan(resolve(str(TINY), [f"pool={pool}"])).most_under_way == count

    @pytest.mark.parametrize("name", ["ppo", "at_grpo", "dr_mas"])
    def test_what_needs_a_group_or_a_critic_alone_streams_without_a_warning(self, name: str) -> None:
        config = resolve(str(TINY), [f"agents.solver.algorithm.name={name}"])
        assert orchestrator_plan(config).whole_step == () and warnings_about(config) == []

    def test_only_an_agent_with_a_critic_has_its_settings(self) -> None:
        config = resolve(
            str(TINY), ["agents.solver.algorithm.name=ppo", "agents.solver.algorithm.critic.lr=1.0e-4"]
        )
        critics = {name: policy.algorithm.critic for name, policy in config.policies.items()}
        assert critics[CHECKER] is None
        mine = critics[SOLVER]
        assert mine is not None and mine.lr == 1e-4
        assert check(yaml.safe_load(to_yaml(config)), "config.yaml") == config

    def test_a_resolved_config_resolves_to_itself(self) -> None:
        config = resolve(
            str(TINY), ["data={a: [1, null, {b: 2.5}], c: '5e-4'}", "agents.solver.optimizer.lr=1e-7"]
        )
        written = to_yaml(config)
        assert check(yaml.safe_load(written), "config.yaml") == config
        assert to_yaml(check(yaml.safe_load(written), "config.yaml")) == written

    def test_columns_are_declared_by_agent(self) -> None:
        declared = "{plan: {type: tokens}, embedding: {type: tensor, dtype: float32, shape: [null, 8]}}"
        config = resolve(str(TINY), [f"agents.solver.columns={declared}"])
        plan, embedding = Column(type="tokens"), Column(type="tensor", dtype="float32", shape=(None, 8))
        assert config.columns() == {"solver": {"plan": plan, "embedding": embedding}, "checker": {}}
        assert check(yaml.safe_load(to_yaml(config)), "config.yaml") == config

    def test_a_path_never_means_a_built_in_recipe_or_a_neighbour(
        self, recipe: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shutil.copytree(recipe, recipe.parent / "my_recipe")
        built_in = shutil.copytree(recipe, recipe.parent / "built_in" / "my_recipe")
        monkeypatch.setattr(config_module, "RECIPES", built_in.parent)
        monkeypatch.chdir(recipe.parent)
        assert resolve("my-recipe", []).recipe == str(built_in)
        assert resolve("./my-recipe", []).recipe == str(recipe)
        assert resolve(str(recipe), []).recipe == str(recipe)

    @pytest.mark.parametrize("file", ["config.yaml", "workflow.py"])
    def test_a_recipe_without_its_files_is_none(self, recipe: Path, file: str) -> None:
        (recipe / file).unlink()
        with pytest.raises(
            ConfigError,
            match=rf"no recipe '.*my-recipe': the folder has no {file}; a recipe has a workflow.py and a config.yaml",
        ):
            resolve(str(recipe), [])

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"training: [1", "is invalid YAML: line 1, column 13: expected"),
            (b"a:\n\tb: 1", "is invalid YAML: line 2, column 1: found character .*; indent with spaces"),
            (b"agents: \xff", "is invalid YAML"),
            (b"a: !!python/object/apply:os.getcwd []", "is invalid YAML"),
            (b"", "holds no mapping"),
            (b"- 1", "holds no mapping"),
        ],
    )
    def test_a_broken_file_is_named(self, recipe: Path, content: bytes, message: str) -> None:
        (recipe / "config.yaml").write_bytes(content)
        with pytest.raises(ConfigError, match=f"config.yaml {message}"):
            resolve(str(recipe), [])


@pytest.fixture(scope="module")
def tiny() -> Iterator[RunConfig]:
    yield resolve(str(TINY), [])


keys = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda key: key not in ("on", "off", "y", "n", "no", "yes", "true", "false", "null")
)
# PyYAML writes "\x85", a line's end to it, so that it reads a space.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x85"))
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)


class TestOverrides:
    @given(path=st.lists(keys, min_size=1, max_size=3), value=values)
    @example(path=["x"], value="a=b")
    @example(path=["x"], value="5e-4")
    def test_any_value_arrives_as_it_was_written(self, path: list[str], value: Any) -> None:
        override = (
            f"data.{'.'.join(path)}={yaml.safe_dump(value, default_flow_style=True, allow_unicode=True)}"
        )
        found: Any = resolve(str(TINY), [override]).data
        for key in path:
            found = found[key]
        assert found == value and type(found) is type(value)

    @given(override=st.text(max_size=30))
    @example("training.steps=0x10")
    @example("data.a=&x [*x]")
    @example("data=.inf")
    def test_whatever_is_written_gives_a_config_or_a_refusal(self, override: str) -> None:
        try:
            config = resolve(str(TINY), [override])
        except ConfigError as error:
            assert str(error)
        else:
            assert check(yaml.safe_load(to_yaml(config)), "again") == config

    def test_the_last_one_counts(self) -> None:
        assert resolve(str(TINY), ["training.steps=1", "training.steps=2"]).training.steps == 2
