"""Measures router replay: how far engine and trainer of a mixture of experts differ, with it and without.

The embedded engine generates with a random model in bfloat16, and the trainer computes the log-probabilities of the
same tokens: with the experts that its routers choose, and with those of the engine. The keys, of both, ``plain`` and
``replayed``:

    mean_NAME    mean of ``|w - 1|``, w the trainer's probability of a token over the engine's
    p99_NAME     of the difference of the log-probabilities; likewise max_NAME

Of them ``max_share``, replayed over plain. ``other_choices``: the share of the trainer's choices of an expert that the
engine did not make; ``other_tokens``: of tokens with such a choice in any layer. ``token_bytes``: of the routes of a
token. ``engine_time``: generation with the recording over that without; ``trainer_time``: forward and backward with the
replay over those without, the medians of rounds in turns. Also: goals, machine, settings.
"""

import asyncio
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Final

import click
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from flexmarl.actors.expert_routes import routes_column
from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.inference.engines.engine import EngineRequest, EngineResult
from flexmarl.actors.messages import ModelConfig, Sample
from flexmarl.actors.pretrained import empty_model
from flexmarl.actors.routers import RouteRecorder
from flexmarl.actors.trainer.backends.torch_policy.completion_model import (
    CompletionModel,
    named_weights,
    placed_model,
)
from flexmarl.actors.trainer.backends.torch_policy.row_routes import row_routes
from flexmarl.actors.trainer.padding import PaddedRows, pad_rows
from flexmarl.launch.bench import machine
from flexmarl.launch.bench.command import common_options, run_benchmark
from flexmarl.launch.bench.goals import Goal, judge
from flexmarl.launch.bench.measure import rounded
from flexmarl.launch.bench.result_tables import goals_table, warn_if_busy

GOALS: Final = (
    Goal("max_share", "largest difference of a log-probability: replayed over plain", 0.5, at_most=True),
    Goal("engine_time", "generation with the recording over that without", 1.1, at_most=True),
    Goal("trainer_time", "training with the replay over that without", 1.1, at_most=True),
)
NAMES: Final = ("plain", "replayed")
_SEED: Final = 3
_PROMPT_TOKENS: Final = 32
_VOCABULARY: Final = 512
_TRAINED: Final = 2
"""Samples of a round of training: bfloat16 is slow on most CPUs."""


@dataclass(frozen=True, slots=True)
class Options:
    """``tokens``: of each of the answers. Weights are larger than those of an untrained model, whose experts hardly
    differ."""

    rounds: int = 3
    answers: int = 16
    tokens: int = 64
    layers: int = 8
    experts: int = 64
    top_k: int = 8
    hidden: int = 256

    def model(self) -> ModelConfig:
        config = {
            "model_type": "qwen3_moe", "vocab_size": _VOCABULARY, "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden, "moe_intermediate_size": self.hidden // 2,
            "num_experts": self.experts, "num_experts_per_tok": self.top_k, "num_hidden_layers": self.layers,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "norm_topk_prob": True,
            "initializer_range": 0.06, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
            "pad_token_id": None, "max_position_embeddings": 512,
        }  # fmt: skip
        return ModelConfig(config=config, tokenizer="unused", dtype="bfloat16")


@dataclass(frozen=True, slots=True)
class Figures:
    """``differences``: of the trainer's log-probabilities from the engine's, float64 ``[N]``, by name. ``chosen`` and
    ``replayed``: experts ``[tokens, layers, top_k]``, of the trainer's routers and of the engine. ``engine_s`` and
    ``trainer_s``: seconds by round, by name."""

    differences: Mapping[str, NDArray[np.float64]]
    chosen: NDArray[Any]
    replayed: NDArray[Any]
    engine_s: Mapping[str, Sequence[float]]
    trainer_s: Mapping[str, Sequence[float]]


def compute(options: Options, report: Callable[[str], None]) -> Figures:
    """With one thread of torch, as actors have on a host of few cores."""
    torch.set_num_threads(1)
    report("generation")
    engine_s, samples = _generate(options)
    models = {name: CompletionModel(options.model(), placed_model(options.model(), _SEED)) for name in NAMES}
    models["replayed"].replay_routes()
    recorder = RouteRecorder(models["plain"].model)
    for completions in models.values():
        completions.narrow()
    by_engine = np.concatenate([sample.logprobs for sample in samples])
    report("log-probabilities")
    with torch.no_grad():
        logprobs = {name: models[name].logprobs(_rows(samples)) for name in NAMES}
    differences = {name: tensor.double().numpy() - by_engine for name, tensor in logprobs.items()}
    chosen = recorder.take().numpy()
    trainer_s: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in range(options.rounds):
        report(f"training, round {number + 1} of {options.rounds}")
        for name, completions in models.items():
            began = perf_counter()
            torch.autograd.backward(completions.logprobs(_rows(samples[:_TRAINED])).sum())
            trainer_s[name].append(perf_counter() - began)
            completions.model.zero_grad()
    return Figures(differences, chosen, _experts(samples), engine_s, trainer_s)


def _generate(options: Options) -> tuple[dict[str, list[float]], list[Sample]]:
    """Seconds of each round, by name, and the samples of the last one."""
    requests = _requests(options)
    engines = {name: _engine(options, records=name == "replayed") for name in NAMES}
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    results: dict[str, EngineResult] = {}
    for _ in range(options.rounds):
        for name, engine in engines.items():
            began = perf_counter()
            for request in requests:
                engine.add(request)
            results = {}
            while engine.pending:
                results |= {result.request_id: result for result in engine.step()}
            seconds[name].append(perf_counter() - began)
    return seconds, [_sample(request, results[request.request_id]) for request in requests]


def _requests(options: Options) -> list[EngineRequest]:
    rng = random.Random(_SEED)
    return [
        EngineRequest(
            str(number),
            tuple(rng.randrange(_VOCABULARY) for _ in range(_PROMPT_TOKENS)),
            number,
            1.0,
            options.tokens,
        )
        for number in range(options.answers)
    ]


def _engine(options: Options, *, records: bool) -> TransformersEngine:
    model = options.model()
    engine = TransformersEngine(
        empty_model(model),
        [],
        max_batch=options.answers,
        max_context=256,
        prefix_reuse=False,
        records_routes=records,
    )
    weights = engine.weights()
    for name, tensor in named_weights(placed_model(model, _SEED)).items():
        weights[name].copy_(tensor)
    engine.weights_loaded(weights)
    return engine


def _sample(request: EngineRequest, result: EngineResult) -> Sample:
    name = request.request_id
    columns = routes_column(result.routes)
    return Sample(
        f"1:q{name}_0_0", "agent", 0, 0, f"1:q{name}", 0.0, 1.0, request.prompt_tokens, result.tokens, result.logprobs,
        columns=columns,
    )  # fmt: skip


def _rows(samples: Sequence[Sample]) -> PaddedRows:
    rows = pad_rows([(sample.prompt_tokens, sample.tokens) for sample in samples], _VOCABULARY)
    return replace(rows, routes=row_routes([[sample] for sample in samples], packed=False))


def _experts(samples: Sequence[Sample]) -> NDArray[Any]:
    routes = row_routes([[sample] for sample in samples], packed=False)
    assert routes is not None, "the engine records them"
    return routes.experts.numpy()


async def measure(options: Options, report: Callable[[str], None]) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    described = await machine.describe()
    figures = await asyncio.to_thread(compute, options, report)
    return {**figures_of(figures), "machine": described, "settings": asdict(options)}


def figures_of(figures: Figures) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, differences in figures.differences.items():
        size = np.abs(differences)
        result[f"mean_{name}"] = float(np.abs(np.expm1(differences)).mean())
        result[f"p99_{name}"] = float(np.quantile(size, 0.99))
        result[f"max_{name}"] = float(size.max())
    result["max_share"] = result["max_replayed"] / result["max_plain"]
    chosen, replayed = figures.chosen.astype(np.int64), figures.replayed.astype(np.int64)
    was_made = (chosen[..., :, None] == replayed[..., None, :]).any(-1)  # [tokens, layers, top_k]
    result["other_choices"] = float(1 - was_made.mean())
    result["other_tokens"] = float(1 - was_made.all((1, 2)).mean())
    result["token_bytes"] = int(np.prod(replayed.shape[1:]))
    for name, seconds in (("engine_time", figures.engine_s), ("trainer_time", figures.trainer_s)):
        result[name] = statistics.median(seconds["replayed"]) / statistics.median(seconds["plain"])
    goals = [asdict(verdict) for verdict in judge(GOALS, result)]
    return {**{key: rounded(value) for key, value in result.items()}, "goals": goals}


def tables(console: Console, result: Mapping[str, Any]) -> None:
    table = Table(title="the trainer beside the engine", title_justify="left", title_style="bold")
    for column in ("", "mean |w - 1|", "p99 of the log-probs", "max"):
        table.add_column(column, justify="left" if not column else "right")
    for name in ("plain", "replayed"):
        table.add_row(name, *(f"{result[f'{figure}_{name}']:.2g}" for figure in ("mean", "p99", "max")))
    console.print(table)
    console.print(
        f"{result['other_choices']:.2%} of the choices of an expert are others, in {result['other_tokens']:.1%} of the "
        f"tokens; the routes of a token take {result['token_bytes']:g} bytes"
    )
    console.print(goals_table("router replay", result["goals"], "bound"))
    warn_if_busy(console, result)


@click.command()
@common_options(rounds=3, quick_time="half a minute")
def routes(as_json: bool, rounds: int | None, quick: bool) -> int:
    """Measure how far trainer and engine of a mixture of experts differ, with router replay and without.

    \b
    Examples:
      scripts/bench/run routes
      scripts/bench/run routes --json > routes.json

    Needs 2 GB of memory. Progress is on standard error; ctrl-C stops it.
    """
    options = (
        Options(rounds=rounds or 1, answers=4, tokens=16, layers=4) if quick else Options(rounds=rounds or 3)
    )
    return run_benchmark(partial(measure, options), 2, tables, as_json)
