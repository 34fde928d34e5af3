"""What a config may say, and how it is told otherwise."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from flexmarl.actors.declared_columns import Column
from flexmarl.actors.errors import ConfigError
from flexmarl.launch import run_config as config_module
from flexmarl.launch.run_config import RunConfig, check, read_yaml, resolve, to_yaml

from .conftest import TINY


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A copy of the tiny recipe, to be changed."""
    return shutil.copytree(TINY, tmp_path / "my-recipe")


def change(recipe: Path, **sections: Any) -> None:
    file = recipe / "config.yaml"
    file.write_text(yaml.safe_dump({**read_yaml(file), **sections}))


class TestResolving:
    def test_agents_get_the_defaults_and_say_what_differs(self, recipe: Path) -> None:
        change(recipe, agents={"solver": {"sampling": {"temperature": 0.5}}, "checker": None})
        config = resolve(str(recipe), ["agents.checker.instances=2", "agent_defaults.optimizer.lr=3e-4"])
        solver, checker = config.agents["solver"], config.agents["checker"]
        assert (solver.sampling.temperature, solver.sampling.max_new_tokens) == (0.5, 3)
        assert (checker.sampling.temperature, checker.instances) == (1.0, 2)
        assert solver.optimizer.lr == checker.optimizer.lr == 3e-4

    def test_paths_within_the_recipe_are_made_absolute(
        self, recipe: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(recipe.parent)
        (recipe.parent / "words").mkdir()
        overrides = ["agents.solver.model={path: some/hub-name, config: null, tokenizer: words}"]
        config = resolve("my-recipe", overrides)
        assert config.recipe == str(recipe)
        assert config.agents["solver"].model.tokenizer == str(recipe.parent / "words")
        assert config.agents["checker"].model.tokenizer == str(recipe / "tokenizer")
        assert config.agents["solver"].model.path == "some/hub-name"

    def test_staleness_is_one_version_under_async_unless_said(self) -> None:
        assert resolve(str(TINY), []).schedule().max_staleness == 0
        config = resolve(str(TINY), ["mode=async", "agents.solver.global_batch=6"])
        assert config.schedule().max_staleness == 1 and config.schedule().global_batch == {"solver": 6}
        assert {policy.max_staleness for policy in config.policies().values()} == {1}
        assert resolve(str(TINY), ["mode=async", "max_staleness=3"]).schedule().max_staleness == 3

    def test_a_policy_that_cannot_stream_waits_for_its_whole_step(self) -> None:
        config = resolve(str(TINY), ["agents.solver.algorithm.name=reinforce_pp"])
        assert config.schedule().whole_step == ("solver",)
        assert "solver: reinforce_pp can't train" in config.warnings()[0]

    @pytest.mark.parametrize("name", ["ppo", "at_grpo", "dr_mas"])
    def test_what_needs_a_group_or_a_critic_alone_streams_without_a_warning(self, name: str) -> None:
        config = resolve(str(TINY), [f"agents.solver.algorithm.name={name}"])
        assert config.schedule().whole_step == () and config.warnings() == []

    def test_only_an_agent_with_a_critic_has_its_settings(self) -> None:
        config = resolve(
            str(TINY), ["agents.solver.algorithm.name=ppo", "agents.solver.algorithm.critic.lr=1.0e-4"]
        )
        critics = {name: agent.algorithm.critic for name, agent in config.agents.items()}
        assert critics["checker"] is None
        assert critics["solver"] is not None and critics["solver"].lr == 1e-4
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
            ConfigError, match=rf"no recipe '.*my-recipe': neither built in .* nor a folder with a {file}"
        ):
            resolve(str(recipe), [])

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"training: [1", "is no YAML"),
            (b"agents: \xff", "is no YAML"),
            (b"a: !!python/object/apply:os.getcwd []", "is no YAML"),
            (b"", "holds no mapping"),
            (b"- 1", "holds no mapping"),
        ],
    )
    def test_a_broken_file_is_named(self, recipe: Path, content: bytes, message: str) -> None:
        (recipe / "config.yaml").write_bytes(content)
        with pytest.raises(ConfigError, match=f"config.yaml {message}"):
            resolve(str(recipe), [])


class TestRefusals:
    @pytest.mark.parametrize(
        ("override", "message"),
        [
            (
                "training.foo=1",
                r"training.foo: there is no such key \(value 1\); allowed: steps, queries_per_step",
            ),
            (
                "agents.solver.columns.plan={typ: tokens}",
                r"agents.solver.columns.plan.typ: there is no such key .* allowed: type, required, dtype",
            ),
            ("agents.solver.columns={plan: {type: list}}", "columns.plan.type='list': .* 'tensor'"),
            (
                "agents.solver.columns={tokens: {type: tokens}}",
                "agents.solver.columns: column 'tokens': every table has it already",
            ),
            (
                "agents.solver.columns={Plan: {type: tokens}}",
                "agents.solver.columns: column 'Plan': a name is",
            ),
            (
                "agents.solver.columns={x: {type: tensor, dtype: bfloat16}}",
                "agents.solver.columns: column 'x': NumPy has no bfloat16",
            ),
            (
                "agents={solver: {columns: {x: {type: int}}}, checker: {columns: {x: {type: str}}}}",
                "column 'x' is str for agent 'checker' and int for another",
            ),
            ("foo=1", r"foo: there is no such key .* allowed: recipe, seed, mode"),
            ("agents.solver.model.foo=1", r"agents.solver.model.foo: .* allowed: path, config, tokenizer"),
            ("agents.solvr.instances=2", "there is no agent 'solvr'; there are: solver, checker"),
            ("training.steps=abc", "training.steps='abc': Input should be a valid integer"),
            ("training.steps=2.0", "training.steps=2.0: Input should be a valid integer"),
            ("training.steps=true", "training.steps=True: Input should be a valid integer"),
            ("training.steps=null", "training.steps=None: Input should be a valid integer"),
            ("training.steps=-1", "training.steps=-1: Input should be greater than or equal to 1"),
            ("training.micro_batch=0", "training.micro_batch=0: Input should be greater than or equal to 1"),
            ("training.micro_batch=100000", "training.micro_batch=100000 is more than the 8 trajectories"),
            (
                "training.trajectories_per_query=1",
                "trajectories_per_query=1: agents.solver.algorithm.name=grpo compares .* wants 2 or more",
            ),
            ("training=5", "training=5: Input should be a valid dictionary"),
            ("agents.solver.instances=0", "agents.solver.instances=0: .* equal to 1"),
            (
                "agents.solver.sampling.temperature=-1",
                "agents.solver.sampling.temperature=-1: .* greater than",
            ),
            ("agents.solver.sampling.temperature=0", "temperature=0"),
            ("agents.solver.sampling.temperature=.nan", "agents.solver.sampling.temperature=nan: .* finite"),
            (
                "agents.solver.algorithm={name: ppo, critic: {foo: 1}}",
                r"algorithm.critic.foo: .* allowed: lr, max_grad_norm, gamma, lam",
            ),
            ("agents.solver.algorithm.critic.lr=1", "agents.solver.algorithm: grpo has no critic"),
            (
                "agents.solver.sampling.overlong_buffer=9",
                "agents.solver.sampling: overlong_buffer=9 is more than max_new_tokens=3",
            ),
            ("agents.solver.optimizer.lr=0", "agents.solver.optimizer.lr=0: Input should be greater than 0"),
            ("agents.solver.optimizer.lr=.inf", "agents.solver.optimizer.lr=inf: .* finite"),
            ("agents.solver.optimizer.betas=[0.9]", "agents.solver.optimizer.betas.1: is missing"),
            (
                "agents.solver.optimizer.betas=[0.9, 1.5]",
                "agents.solver.optimizer.betas.1=1.5: .* less than 1",
            ),
            ("agents.solver.optimizer.betas=0.9", "agents.solver.optimizer.betas=0.9: .* tuple"),
            ("agents.solver.model.path=x", "agents.solver.model: give exactly one of `path`"),
            (
                "agents.solver.model.tokenizer=/no/where",
                "agents.solver.model.tokenizer='/no/where': there is no such",
            ),
            ("agents.solver.model.tokenizer=./no", "agents.solver.model.tokenizer='./no': there is no such"),
            ("agents.solver=5", "agents.solver=5: Input should be a valid dictionary"),
            ("agents={}", "agents: Dictionary should have at least 1 item"),
            ("agents={Bad-Name: {}}", "agent name 'Bad-Name': lower-case letters"),
            ("agents={metrics: {}}", "agent name 'metrics' is taken"),
            ("agents={1: {}}", "agents.1.*valid string"),
            ("agent_defaults=[1]", r"agent_defaults=\[1\]: must be a section"),
            ("seed=-1", "seed=-1: Input should be greater than or equal to 0"),
            ("seed=9223372036854775808", "seed=9223372036854775808: .* less than"),
            ("mode=fast", "mode='fast': Input should be 'strict', 'sync' or 'async'"),
            ("max_staleness=2", "max_staleness=2 is for mode=async; in mode=strict every sample"),
            ("max_staleness=0", "max_staleness=0: .* equal to 1"),
            ("max_staleness=17", "max_staleness=17: .* equal to 16"),
            (
                "agents.checker.global_batch=4",
                "agents.checker.global_batch=4 is for mode=async: .* carried .* stale there, which mode=strict",
            ),
            (
                "rollout.min_trajectories=5",
                "min_trajectories=5 is more than training.trajectories_per_query=4",
            ),
            ("rollout.oversampled=keep", "rollout: oversampled=keep needs extra_trajectories"),
            ("rollout.drop_zero_advantage=true", "drop_zero_advantage needs replacement_queries"),
            ("rollout.on_timeout=wait", "rollout.on_timeout='wait': Input should be 'drop' or 'replace'"),
            ("rollout.max_failed_share=2", "rollout.max_failed_share=2: .* less than or equal to 1"),
            ("rollout.trajectory_timeout_s=0", "rollout.trajectory_timeout_s=0: .* greater than 0"),
            ("checkpoint.keep=0", "checkpoint.keep=0: .* equal to 1"),
            ("data=[1]", r"data=\[1\]: Input should be a valid dictionary"),
            ("data.when=2024-01-01", r"data.when=datetime.date\(2024, 1, 1\): .*valid JSON"),
            ("recipe=/elsewhere", "the key recipe can't be set"),
            ("=3", "override '=3': write key.key=value"),
            ("a..b=3", "override 'a..b=3': write key.key=value"),
            ("training.steps.x=5", "training.steps is the value 6, not a section"),
            ("training.steps=[1", "the value is no YAML"),
        ],
    )
    def test_of_an_override_name_key_value_and_what_is_allowed(self, override: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            resolve(str(TINY), [override])

    def test_of_dynamic_sampling_for_who_compares_nothing(self) -> None:
        sampling = "rollout={drop_zero_advantage: true, replacement_queries: 4}"
        with pytest.raises(
            ConfigError, match=r"agents.solver.algorithm.name=ppo learns where they are equal"
        ):
            resolve(str(TINY), ["agents.solver.algorithm.name=ppo", sampling])

    def test_of_a_batch_smaller_than_its_parts(self) -> None:
        with pytest.raises(ConfigError, match="global_batch=1 is less than training.micro_batch=2"):
            resolve(str(TINY), ["mode=async", "agents.solver.global_batch=1"])

    def test_list_every_problem(self) -> None:
        with pytest.raises(ConfigError) as caught:
            resolve(str(TINY), ["seed=-1", "mode=fast", "training.steps=0"])
        assert len(str(caught.value).splitlines()) == 4

    @pytest.mark.parametrize("name", ["ppo", "reinforce_pp"])
    def test_none_of_one_trajectory_where_nothing_is_compared(self, name: str) -> None:
        overrides = [f"agents.{agent}.algorithm.name={name}" for agent in ("solver", "checker")]
        config = resolve(str(TINY), [*overrides, "training.trajectories_per_query=1"])
        assert config.training.trajectories_per_query == 1

    def test_never_change_the_recipe(self) -> None:
        before = (TINY / "config.yaml").read_bytes()
        resolve(str(TINY), ["training.steps=1"])
        assert (TINY / "config.yaml").read_bytes() == before


@pytest.fixture(scope="module")
def tiny() -> Iterator[RunConfig]:
    yield resolve(str(TINY), [])


keys = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda key: key not in ("on", "off", "y", "n", "no", "yes", "true", "false", "null")
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
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


def test_what_time_decides_is_refused_where_it_may_decide_nothing() -> None:
    judged = "agents.sorter.columns={judged: {type: float, required: true, written_by: external}}"
    resolve("sort-digits", [judged])
    with pytest.raises(ConfigError, match="agents.sorter.columns.judged is required and written_by external"):
        resolve("sort-digits", [judged, "deterministic=true"])


def test_a_global_batch_is_refused_where_it_would_cut_through_groups_that_are_compared() -> None:
    async_run = ["mode=async", "agents.sorter.global_batch=40", "agents.sorter.algorithm.name=rloo"]
    resolve("sort-digits", async_run)
    penalised = [*async_run, "agents.sorter.algorithm.kl_coefficient=0.1"]
    with pytest.raises(ConfigError, match="global_batch=40 cuts through groups, whose KL rloo compares"):
        resolve("sort-digits", penalised)
    resolve(
        "sort-digits",
        [*penalised, "agents.sorter.algorithm.kl_in_reward=false", "agents.sorter.algorithm.kl_estimator=k3"],
    )
