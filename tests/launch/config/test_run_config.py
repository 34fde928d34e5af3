"""Configs that are refused, by name and with the reason."""

import shutil
from pathlib import Path

import pytest
import yaml

from flexmarl.actors.errors import ConfigError
from flexmarl.actors.inference.inference_config import EmbeddedEngineConfig
from flexmarl.actors.names import PolicyName
from flexmarl.launch.config.config_reading import check, resolve, to_yaml
from flexmarl.launch.config.config_warnings import warnings_about
from flexmarl.launch.run.role_setups import served_policies

from ..conftest import TINY

SOLVER = PolicyName("solver")


ADAPTERS = ("agent_defaults.lora={}", "agent_defaults.engine={name: vllm}")
APART = {("solver",): 1, ("checker",): 1}


@pytest.mark.parametrize(
    ("overrides", "together"),
    [
        ((), APART),
        (("agent_defaults.lora={}",), APART),
        (ADAPTERS, {("solver", "checker"): 1}),
        (
            (*ADAPTERS, "agent_defaults.instances=2", "agents.checker.lora={rank: 4}"),
            {("solver", "checker"): 2},
        ),
        ((*ADAPTERS, "agents.checker.engine.max_batch=8"), APART),
        ((*ADAPTERS, "agents.checker.model.dtype=bfloat16"), APART),
        (("agent_defaults.engine={name: vllm}", "agents.checker.lora={}"), APART),
    ],
)
def test_adapters_over_the_same_model_share_instances_of_an_engine_that_serves_adapters(
    overrides: tuple[str, ...], together: dict[tuple[str, ...], int]
) -> None:
    assert resolve(str(TINY), list(overrides)).served_together() == together


class TestRefusals:
    @pytest.mark.parametrize(
        ("override", "message"),
        [
            (
                "training.foo=1",
                r"training.foo: there is no such key \(value 1\); allowed: steps, queries_per_step",
            ),
            (
                "rollout.tree.branch=foo",
                "rollout.tree.branch='foo': there is no such tree; there are: greedy, entropy, predicted",
            ),
            (
                "rollout.filters=[{name: contras}]",
                "rollout.filters.0.name='contras': there is no such filter; there are: .*, contrast, function",
            ),
            (
                "rollout.filters=[{name: contrast, keep: 0}]",
                r"rollout.filters.0.keep: the filter contrast has no such option \(value 0\); allowed: name, extremes",
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
            ("traning.steps=1", r"traning: there is no such key .*; do you mean training\?"),
            ("lr=1", r"lr: there is no such key .*; do you mean agent_defaults.optimizer.lr or "),
            (
                "training.lr=1",
                r"training.lr: there is no such key .*; do you mean agent_defaults.optimizer.lr or ",
            ),
            ("optimizer.lr=1", r"optimizer: .*; do you mean agent_defaults.optimizer.lr\?"),
            ("agents.solver.sampling.max_tokens=1", r"max_tokens: .*; do you mean max_new_tokens\?"),
            (
                "agents.solver.model.load_in_4bit=true",
                r"load_in_4bit: .*; policies are trained as .*, not quantized",
            ),
            (
                "agents=[{name: solver}]",
                r"agents=.*: is a list, needs a section of keys: write `name: \{\}` for each",
            ),
            ("agents.solver.sampling.stop=5", r"stop=5: is a number, needs a list"),
            ("agents.solver.model.foo=1", r"agents.solver.model.foo: .* allowed: path, config, tokenizer"),
            ("agents.solvr.instances=2", "there is no agent 'solvr'; there are: solver, checker"),
            ("training.steps=abc", "training.steps='abc': Input should be a valid integer"),
            ("training.steps=2.0", "training.steps=2.0: Input should be a valid integer"),
            ("training.steps=true", "training.steps=True: Input should be a valid integer"),
            ("training.steps=null", "training.steps=None: Input should be a valid integer"),
            ("training.steps=-1", "training.steps=-1: Input should be greater than or equal to 0"),
            ("training.micro_batch=0", "training.micro_batch=0: Input should be greater than or equal to 1"),
            ("training.micro_batch=100000", "training.micro_batch=100000 is more than the 8 trajectories"),
            (
                "training.trajectories_per_query=1",
                "trajectories_per_query=1: agents.solver.*name=grpo compares .* 2 or more; reinforce_pp, ppo, rae do",
            ),
            ("pool={name: shared}", "pool.slots: is missing"),
            ("pool.slots=2", "pool.slots: the pool static has no such option"),
            ("pool={name: shared, slots: two}", "pool.slots='two': a number is wanted, or auto"),
            ("pool={name: shared, slots: 0}", "pool.slots=0: Input should be greater than or equal to 1"),
            (
                "trainer.ranks=2",
                "trainer.ranks=2 wants slot workers: write pool={name: shared, slots: 2}",
            ),
            (
                "trainer={ranks: auto, min_ranks: 3}",
                "trainer.min_ranks=3 wants slot workers: write pool={name: shared, slots: auto}, or leave",
            ),
            (
                "agent_defaults.lora={rank: 0}",
                "agents.solver.lora.rank=0: .* equal to 1|agent_defaults.lora.rank=0: .*",
            ),
            (
                "agents.solver.lora={dropout: 0.1}",
                "agents.solver.lora: dropout=0.1: trainer and engine .* an adapter has no dropout: leave it out",
            ),
            ("agents.solver.lora={targets: []}", "names of linear layers, at least one"),
            ("agents.solver.lora={targets: [v, v]}", "names of linear layers, at least one and each once"),
            (
                "agents.solver={lora: {}, engine: {name: simulated}, trainer: {name: simulated}}",
                "agents.solver: lora: a simulated policy has no layers to adapt",
            ),
            (
                "agents.solver={lora: {rank: 513}, engine: {name: vllm}}",
                "agents.solver: lora.rank=513: vLLM has no adapters with a rank above 512",
            ),
            ("training=5", "training=5: is a number, needs a section of keys"),
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
            (
                "agents.solver.optimizer.betas=0.9",
                "agents.solver.optimizer.betas=0.9: is a number, needs a list",
            ),
            ("agents.solver.model.path=x", "agents.solver.model: give exactly one of `path`"),
            (
                "agents.solver.model.tokenizer=/no/where",
                "agents.solver.model.tokenizer='/no/where': there is no such",
            ),
            ("agents.solver.model.tokenizer=./no", "agents.solver.model.tokenizer='./no': there is no such"),
            ("agents.solver=5", "agents.solver=5: is a number, needs a section of keys"),
            ("agents={}", "agents: Dictionary should have at least 1 item"),
            ("agents={Bad-Name: {}}", "agent name 'Bad-Name': lower-case letters"),
            ("agents={metrics: {}}", "agent name 'metrics' is taken"),
            (
                "agents={rollout: {}}",
                "policy name 'rollout' is taken: its instances would have the names of rollout",
            ),
            ("agents={slot: {}}", "policy name 'slot' is taken"),
            ("agents={1: {}}", "agents.1.*valid string"),
            ("agent_defaults=[1]", r"agent_defaults=\[1\]: is a list, needs a section of keys"),
            (
                "engine.name=vlm",
                "engine.name='vlm': there is no such engine; there are: embedded, vllm, openai, simulated",
            ),
            ("agents.solver.engine.name=3", "agents.solver.engine.name=3: there is no such engine"),
            ("agents.solver.engine=3", "agents.solver.engine=3: is a number, needs a section of keys"),
            (
                "engine={name: simulated, tokens_s: 1.0}",
                "  engine.tokens_s: the engine simulated has no such option .value 1.0.; allowed: .*token_s, crowding",
            ),
            (
                "agent_defaults.engine.token_s=1.0",
                "agent_defaults.engine.token_s: the engine embedded has no such",
            ),
            ("agents.solver.engine.max_batch=0", "agents.solver.engine.max_batch=0: .* equal to 1"),
            ("trainer.name=jax", "trainer.name='jax': there is no such trainer; there are: torch, simulated"),
            (
                "engine.name=simulated",
                "agents.solver: engine.name=simulated and trainer.name=torch: engine and trainer are both",
            ),
            ("agent_defaults.model=null", "agent_defaults.model: is missing"),
            (
                "agents.solver={engine: {name: simulated}, trainer: {name: simulated}}",
                "some policies have trainer.name=simulated and others have not: one trainer trains all",
            ),
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
            (
                "query_source={name: variance, pool: 1}",
                "query_source.pool=1 is less than training.queries_per_step=2: no query is twice in a step",
            ),
            (
                "query_source.name=difficulty",
                "query_source.name='difficulty': there is no such query_source; there are: recipe, replay, variance",
            ),
            ("query_source={name: band, low: 0.9}", "query_source: low=0.9 must be less than high=0.8"),
            ("query_source.power=2.0", "query_source.power: the query_source recipe has no such option"),
            ("rollout.oversampled=keep", "rollout: oversampled=keep needs extra_trajectories"),
            (
                "rollout.extra_queries=2",
                "rollout.extra_queries=2 is for mode=async: .* mode=strict trains each",
            ),
            ("rollout.filters=[overlong]", "rollout: filters need replacement_queries"),
            (
                "rollout.filters=[long]",
                "rollout.filters.0.name='long': there is no such .*: "
                "equal_rewards, overlong, near_duplicate, contrast, function",
            ),
            (
                "rollout.filters=[overlong, {name: overlong, tokens: 5}]",
                "rollout.filters=.*: overlong is there twice",
            ),
            ("rollout.filters=[{function: fn}]", "rollout.filters.0.function='fn': .* pattern"),
            (
                "agents.solver.trainer={name: torch, ranks: 2, role_gradients_every: 5}",
                "role_gradients_every=5 is for ranks=1, not for ranks=2",
            ),
            ("rollout.on_timeout=wait", "rollout.on_timeout='wait': Input should be 'drop' or 'replace'"),
            ("rollout.max_failed_share=2", "rollout.max_failed_share=2: .* less than or equal to 1"),
            ("rollout.trajectory_timeout_s=0", "rollout.trajectory_timeout_s=0: .* greater than 0"),
            ("checkpoint.keep=0", "checkpoint.keep=0: .* equal to 1"),
            ("data=[1]", r"data=\[1\]: is a list, needs a section of keys"),
            ("data.when=2024-01-01", r"data.when=datetime.date\(2024, 1, 1\): .*valid JSON"),
            ("recipe=/elsewhere", "the key recipe can't be set"),
            ("=3", "override '=3': write key.key=value"),
            ("a..b=3", "override 'a..b=3': write key.key=value"),
            ("training.steps.x=5", "training.steps is the value 6, not a section"),
            ("training.steps=[1", "the value is invalid YAML"),
        ],
    )
    def test_of_an_override_name_key_value_and_what_is_allowed(self, override: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            resolve(str(TINY), [override])

    def test_of_dynamic_sampling_for_who_compares_nothing(self) -> None:
        sampling = "rollout={filters: [equal_rewards], replacement_queries: 4}"
        with pytest.raises(
            ConfigError,
            match=r"equal_rewards is .* agents.solver.algorithm.name=ppo learns from equal rewards too",
        ):
            resolve(str(TINY), ["agents.solver.algorithm.name=ppo", sampling])

    def test_of_a_gang_larger_than_the_pool(self) -> None:
        with pytest.raises(ConfigError, match="agents.checker.trainer.ranks=3 is more than pool.slots=2"):
            resolve(str(TINY), ["agents.checker.trainer.ranks=3", "pool={name: shared, slots: 2}"])

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ([], r"agents.solver.model.device is cpu: write shm"),
            (["pool={name: shared, slots: 1}"], "cuda_ipc is for pool.name=static: a shared pool publishes"),
            (
                ["agent_defaults.model.device=cuda", "engine={name: vllm, tensor_parallel: 2}"],
                r"the 2 workers of agents.solver.engine.tensor_parallel take .* out of the host's memory",
            ),
        ],
        ids=["cpu", "shared pool", "tensor parallel"],
    )
    def test_of_a_path_of_weights_that_does_not_exist(self, overrides: list[str], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            resolve(str(TINY), ["weights.path=cuda_ipc", *overrides])

    def test_of_an_unknown_path_of_weights(self) -> None:
        with pytest.raises(ConfigError, match="weights.path='nfs': .* 'auto', 'shm', 'cuda_ipc' or 'tcp'"):
            resolve(str(TINY), ["weights.path=nfs"])

    def test_none_of_a_path_that_exists(self) -> None:
        config = resolve(str(TINY), ["weights.path=cuda_ipc", "agent_defaults.model.device=cuda"])
        assert config.weights.only_path == "cuda_ipc"
        assert resolve(str(TINY), []).weights.only_path is None

    @pytest.mark.parametrize("mode", ["sync", "async"])
    def test_of_a_barrier_of_the_step_in_other_modes(self, mode: str) -> None:
        with pytest.raises(ConfigError, match=f"training.barrier=step is for mode=strict, and mode={mode}"):
            resolve(str(TINY), [f"mode={mode}", "training.barrier=step"])

    def test_of_a_batch_smaller_than_its_parts(self) -> None:
        with pytest.raises(ConfigError, match="global_batch=1 is less than training.micro_batch=2"):
            resolve(str(TINY), ["mode=async", "agents.solver.global_batch=1"])

    def test_list_every_problem(self) -> None:
        with pytest.raises(ConfigError) as caught:
            resolve(str(TINY), ["seed=-1", "mode=fast", "training.steps=-1"])
        assert len(str(caught.value).splitlines()) == 4

    def test_list_every_problem_of_sections_with_each_other(self) -> None:
        with pytest.raises(ConfigError) as caught:
            resolve(
                str(TINY), ["max_staleness=2", "training.micro_batch=100", "agents.checker.global_batch=4"]
            )
        _, *problems = str(caught.value).splitlines()
        keys = ["max_staleness=2", "agents.checker.global_batch=4", "training.micro_batch=100"]
        assert [problem.split()[0] for problem in problems[: len(keys)]] == keys
        assert "agents.checker.global_batch=4 is less than training.micro_batch=100" in problems[3]

    @pytest.mark.parametrize("name", ["ppo", "reinforce_pp"])
    def test_none_of_one_trajectory_where_nothing_is_compared(self, name: str) -> None:
        overrides = [f"agents.{agent}.algorithm.name={name}" for agent in ("solver", "checker")]
        config = resolve(str(TINY), [*overrides, "training.trajectories_per_query=1"])
        assert config.training.trajectories_per_query == 1

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ([], r"branch=greedy ends candidates .* set agents.solver.algorithm.rewards=turn"),
            (
                ["name: reinforce_pp"],
                "algorithm.name=reinforce_pp does not: take one that does",
            ),
            (["name: ppo"], "algorithm.name=ppo does not"),
            (["name: rloo, rewards: turn", "kl_coefficient: 0.1"], "compares the KL of whole trajectories"),
        ],
    )
    def test_of_a_tree_whose_turns_the_algorithm_cant_compare(
        self, overrides: list[str], message: str
    ) -> None:
        algorithm = [f"agent_defaults.algorithm={{{', '.join(overrides)}}}"] if overrides else []
        with pytest.raises(ConfigError, match=message):
            resolve(str(TINY), ["rollout.tree={width: 2}", *algorithm])

    def test_of_a_tree_with_rewards_from_outside(self) -> None:
        column = "agents.solver.columns={reward: {type: float, required: true, written_by: external}}"
        tree = ["rollout.tree={branch: entropy}", column]
        with pytest.raises(
            ConfigError, match=r"agents.solver.columns.reward has rewards from outside the run"
        ):
            resolve(str(TINY), tree)

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (
                [],
                "solver.algorithm.name=grpo does not use the rewards of turns: set agents.solver.algorithm.rewards",
            ),
            (
                ["agent_defaults.algorithm={name: at_grpo}", "rollout.tree={branch: entropy}"],
                "leave one of them out",
            ),
            (
                [
                    "agent_defaults.algorithm={name: at_grpo}",
                    "agents.solver.columns={reward: {type: float, required: true, written_by: external}}",
                ],
                "agents.solver.columns.reward has rewards from outside the run",
            ),
            (
                ["agent_defaults.algorithm={name: at_grpo, rewards: trajectory}"],
                "does not use the rewards of turns",
            ),
        ],
    )
    def test_of_demonstrations_whose_rewards_are_not_used(self, overrides: list[str], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            resolve(str(TINY), ["rollout.demonstrations={file: walks.jsonl}", *overrides])

    def test_none_of_demonstrations_with_rewards_of_turns(self) -> None:
        turns = "agent_defaults.algorithm={name: dr_mas, rewards: turn}"
        config = resolve(str(TINY), ["rollout.demonstrations={file: walks.jsonl, most: null}", turns])
        assert config.rollout.demonstrations is not None

    def test_none_of_one_trajectory_that_branches(self) -> None:
        turns = ["agent_defaults.algorithm={name: at_grpo, rewards: turn}", "training.micro_batch=1"]
        config = resolve(str(TINY), ["rollout.tree={width: 2}", "training.trajectories_per_query=1", *turns])
        assert config.rollout.tree is not None
        with pytest.raises(ConfigError, match="trajectories_per_query=1"):
            resolve(str(TINY), ["rollout.tree={width: 1}", "training.trajectories_per_query=1", *turns])

    def test_never_change_the_recipe(self) -> None:
        before = (TINY / "config.yaml").read_bytes()
        resolve(str(TINY), ["training.steps=1"])
        assert (TINY / "config.yaml").read_bytes() == before


def test_what_time_decides_is_refused_where_it_may_decide_nothing() -> None:
    judged = "agents.sorter.columns={judged: {type: float, required: true, written_by: external}}"
    resolve("sort-digits", [judged])
    with pytest.raises(ConfigError, match="agents.sorter.columns.judged is required and written_by external"):
        resolve("sort-digits", [judged, "deterministic=true"])
    with pytest.raises(ConfigError, match="training.largest_micro_batch=64: the time at which samples come"):
        resolve("sort-digits", ["training.largest_micro_batch=64", "deterministic=true"])


def test_samples_are_joined_to_no_less_than_a_micro_batch() -> None:
    resolve("sort-digits", ["training.largest_micro_batch=32"])
    with pytest.raises(ConfigError, match="largest_micro_batch=16 is less than training.micro_batch=32"):
        resolve("sort-digits", ["training.largest_micro_batch=16"])


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


class TestEngines:
    def test_simulated_policies_need_no_model(self) -> None:
        simulated = (
            "engine={name: simulated, token_s: 2.0}",
            "trainer.name=simulated",
            "agent_defaults.model=null",
        )
        config = resolve(str(TINY), [*simulated, "agents.checker.engine.token_s=3.0"])
        assert config.simulated and check(yaml.safe_load(to_yaml(config)), "") == config
        served = served_policies(config)
        assert [policy.model for policy in served.values()] == [None, None]
        times = [policy.engine.token_s for policy in served.values() if policy.engine.name == "simulated"]
        assert times == [2.0, 3.0], "an agent's own section has precedence"

    def test_a_simulated_policy_does_not_use_its_model(self) -> None:
        config = resolve(str(TINY), ["engine.name=simulated", "trainer.name=simulated"])
        assert config.policies[SOLVER].model is not None and config.policies[SOLVER].used_model is None
        assert config.policies[SOLVER].tokenizer == "bytes"

    def test_an_engine_without_exact_draws_is_not_deterministic(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(EmbeddedEngineConfig, "exact_draws", False)
        resolve(str(TINY), [])
        with pytest.raises(
            ConfigError, match="agents.solver.engine.name=embedded draws other tokens for the same"
        ):
            resolve(str(TINY), ["deterministic=true"])

    def test_an_engine_that_can_not_resume_turns_is_noted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        note = "policy solver: the engine embedded can't resume turns: those that new weights interrupt begin again"
        assert note not in warnings_about(resolve(str(TINY), ["mode=async"]))
        monkeypatch.setattr(EmbeddedEngineConfig, "resumable", False)
        assert note in warnings_about(resolve(str(TINY), ["mode=async"]))
        assert note not in warnings_about(resolve(str(TINY), []))

    def test_the_fewest_ranks_without_a_shared_pool_are_noted(self) -> None:
        (note,) = warnings_about(resolve(str(TINY), ["agents.solver.trainer.min_ranks=1"]))
        assert note.startswith("policy solver: trainer.min_ranks=1 has no effect with pool.name=static")
        shared = ["agents.solver.trainer.min_ranks=1", "pool={name: shared, slots: 1}"]
        assert warnings_about(resolve(str(TINY), shared)) == []


@pytest.mark.parametrize("listen", ["0.0.0.0", "*", "::"])
def test_an_address_that_others_could_not_use_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"network.listen=.*: peers can't connect to"):
        resolve(str(TINY), [f"network.listen={listen!r}"])


def test_weights_over_the_network_need_a_network() -> None:
    with pytest.raises(
        ConfigError, match=r"weights.path=tcp: the run listens on no network: write network.listen="
    ):
        resolve(str(TINY), ["weights.path=tcp"])
    assert resolve(str(TINY), ["weights.path=tcp", "network.listen=127.0.0.1"]).weights.only_path == "tcp"


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\u202eb", "a\nb"])
def test_the_name_of_a_recipe_can_be_printed(tmp_path: Path, name: str) -> None:
    shutil.copytree(TINY, tmp_path / name)
    with pytest.raises(ConfigError, match="recipe folder .* has characters that can't be printed: rename it"):
        resolve(str(tmp_path / name), [])
