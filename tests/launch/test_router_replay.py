"""Whole runs of a mixture of experts whose trainer computes with the engine's experts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from flexmarl.actors.expert_routes import ROUTES_COLUMN, Routes
from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.inference.engines.engine import EngineResult
from flexmarl.actors.inference.weights_proof import other_choices
from flexmarl.actors.messages import Sample
from flexmarl.actors.trainer.loss_columns import with_columns
from flexmarl.actors.trainer.pool import slot
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.run.role_setups import served_policies

from .in_process import Finished, RunsHere

MIXTURE = (
    "agent_defaults.model.config={model_type: qwen3_moe, hidden_size: 32, intermediate_size: 64, "
    "moe_intermediate_size: 16, num_experts: 6, num_experts_per_tok: 2, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 1, head_dim: 32, vocab_size: 14, tie_word_embeddings: false, "
    "max_position_embeddings: 64}"
)
REPLAY = "agent_defaults.model.router_replay=true"
SETTINGS = (MIXTURE, "training.steps=3", "agent_defaults.optimizer.lr=0.01")
LAYERS, EXPERTS = 2, 2


@contextmanager
def trained_samples() -> Iterator[list[Sample]]:
    """Samples with their columns, as the trainer gets them within it."""
    trained: list[Sample] = []

    def note(*arguments: Any) -> list[Sample]:
        samples = [*with_columns(*arguments)]
        trained.extend(samples)
        return samples

    with mock.patch(f"{slot.__name__}.with_columns", note):
        yield trained


@contextmanager
def replays_of_proofs() -> Iterator[list[bool]]:
    """Notes for each prompt of a probe within it: the engine computed with its experts, and would have chosen them."""
    replays: list[bool] = []
    replay = TransformersEngine.replay

    def note(engine: TransformersEngine, prompt: tuple[int, ...], routes: Routes) -> EngineResult | None:
        result = replay(engine, prompt, routes)
        assert result is not None and result.routes is not None, "it has room"
        replays.append(not any(other_choices(routes, result.routes)))
        return result

    with mock.patch.object(TransformersEngine, "replay", note):
        yield replays


def train(runs_here: RunsHere, name: str, *settings: str) -> Finished:
    run = runs_here.train(name, *SETTINGS, *settings)
    assert run.status == 0 and not run.problems, run.text
    return run


def learned(run: Finished) -> list[dict[str, Any]]:
    keys = ("loss", "grad_norm", "entropy", "reward_mean")
    return [
        {key: value for key, value in line.items() if key.partition("/")[0] in keys} for line in run.metrics
    ]


@pytest.mark.parametrize(
    "settings",
    [
        ("deterministic=true",),
        ("mode=async",),
        ("pool={name: shared, slots: 1}", "training.updates=2", "training.queries_per_step=4"),
    ],
    ids=["strict", "async", "shared pool and later updates"],
)
def test_every_trained_sample_has_the_routes_of_its_tokens(
    runs_here: RunsHere, settings: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    with trained_samples() as trained, replays_of_proofs() as replays:
        run = train(runs_here, f"replay-{request.node.callspec.id.replace(' ', '-')}", REPLAY, *settings)
    # None: a step without a gradient
    shares = {line.get("replayed_share/solver") for line in run.metrics}
    assert 1.0 in shares <= {1.0, None}
    assert len(replays) >= 8 and all(replays), "the proof of the first version"
    assert len(trained) >= sum(line.get("samples/solver", 0) for line in run.metrics) > 0
    for sample in trained:
        routes = sample.columns[ROUTES_COLUMN]
        assert routes.dtype == "uint8" and routes.max() < 6
        assert routes.shape == (len(sample.prompt_tokens) + len(sample.tokens) - 1, LAYERS, EXPERTS)
        assert (routes[..., 0] != routes[..., 1]).all()


def test_where_engine_and_trainer_agree_a_replay_changes_nothing(runs_here: RunsHere) -> None:
    """In float32 both choose the same experts."""
    with trained_samples() as trained:
        plain = train(runs_here, "plain", "deterministic=true")
    assert not trained
    replayed = train(runs_here, "replayed", "deterministic=true", REPLAY)
    for line, other in zip(learned(plain), learned(replayed), strict=True):
        assert line == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_a_resumed_run_continues_with_it_bit_for_bit(runs_here: RunsHere) -> None:
    whole = train(runs_here, "whole", "deterministic=true", REPLAY, "training.steps=4")
    train(runs_here, "part", "deterministic=true", REPLAY, "training.steps=2")
    resumed = runs_here.resume("part", "training.steps=4")
    assert resumed.status == 0, resumed.text
    assert learned(resumed) == learned(whole)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["agent_defaults.engine.name=vllm"],
            "model.router_replay=true: vLLM records experts on GPUs alone; on CPUs the engine embedded does",
        ),
        (
            [
                "agent_defaults.engine={name: vllm, prefix_reuse: false}",
                "agent_defaults.model.device=cuda",
            ],
            "model.router_replay=true: engine.prefix_reuse=false: vLLM records experts with it alone",
        ),
        (["agent_defaults.trainer.compilation=true"], "layers whose experts are replayed are not compiled"),
        (
            ["agents.sorter.columns={expert_routes: {type: float}}"],
            "'expert_routes': every table has it already",
        ),
        (
            ["agent_defaults.engine={name: simulated}"],
            "model.router_replay=true: the engine simulated does not record experts: embedded and vllm do",
        ),
    ],
)
def test_what_records_or_replays_no_experts_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(Exception, match="router_replay|expert_routes|compiled") as refused:
        resolve("sort-digits", [REPLAY, *settings])
    assert message in str(refused.value)


def test_a_trial_without_models_needs_no_engine_that_records() -> None:
    simulated = ["agent_defaults.engine.name=simulated", "agent_defaults.trainer.name=simulated"]
    config = resolve("sort-digits", [REPLAY, *simulated])
    assert all("expert_routes" not in columns for columns in config.columns().values())


def test_only_trained_policies_record_experts() -> None:
    config = resolve("sort-digits", [REPLAY, "agents.checker.train=false"])
    models = {name: policy.served_model for name, policy in config.policies.items()}
    replays = {name: model is not None and model.router_replay for name, model in models.items()}
    assert replays == {"sorter": True, "checker": False}
    assert {name: "expert_routes" in columns for name, columns in config.columns().items()} == {
        "sorter": True
    }


def test_a_frozen_adapter_has_the_engine_of_the_trained_one_beside_it() -> None:
    engine = ["agent_defaults.engine.name=vllm", "agent_defaults.model.device=cuda"]
    adapters = [*engine, "agent_defaults.lora={rank: 4}", "agents.checker.train=false"]
    config = resolve("sort-digits", [REPLAY, *adapters])
    assert [*config.served_together()] == [("sorter", "checker")]
    models = [served.model for served in served_policies(config).values()]
    assert models[0] is not None and models[0].router_replay and models[1] == models[0]
    alone = resolve("sort-digits", [REPLAY, *engine, "agents.checker.train=false"])
    assert [
        served.model is not None and served.model.router_replay for served in served_policies(alone).values()
    ] == [True, False]


def test_instances_that_move_between_a_policy_and_its_past_need_no_other_engine() -> None:
    past = [REPLAY, "agents.checker={policy: {pool_of: sorter}}"]
    moving = served_policies(resolve("sort-digits", [*past, "balance.scope=intra+inter"]))
    staying = served_policies(resolve("sort-digits", past))
    sorter, checker = moving.values()
    assert sorter.model == checker.model and (sorter.drops_routes, checker.drops_routes) == (False, True)
    assert [served.model == sorter.model for served in staying.values()] == [True, False]
