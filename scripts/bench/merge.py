"""Measures what turns that extend each other save the trainer, and what it costs to look for them in vain.

One policy of the trainer on one thread of the CPU, without a run. Its samples are the turns of a few trajectories, each
prompt the whole turn before and further tokens. They stand in pairs beside the same samples with another first token
in each prompt, of which no one begins with another; and beside as many samples of one turn. The keys:

    tokens, computed_tokens    of the trajectories' samples, prompts included; those of them that the trainer computes
    merged_share               the others' share
    merged_s, apart_s          forward and backward, the medians of the pairs
    ratio                      the first over the second, the median of the pairs
    search_share               of samples without prefixes: the search's part of forward and backward, the median
    shares                     ``merged_share`` of 64 trajectories, by the samples of a micro-batch
    goals                      the goal of each figure, and if it is met

Also: ``machine``, ``versions``, ``settings``.
"""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Final

import click
from rich.console import Console
from rich.text import Text

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import ModelConfig, Sample
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.padding import TokenRows
from flexmarl.actors.trainer.trainer_config import LossConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from flexmarl.launch.bench import machine
from flexmarl.launch.bench.command import common_options, run_benchmark
from flexmarl.launch.bench.goals import Goal
from flexmarl.launch.bench.measure import Report, rounded
from flexmarl.launch.bench.result_tables import goals_table, warn_if_busy
from flexmarl.launch.bench.results import result_of

from .torch_threads import one_torch_thread

_VOCABULARY: Final = 4096
_AGENT: Final = AgentName("agent")
_MICRO_BATCHES: Final = (8, 16, 32, 64, 128)

GOALS: Final = (
    Goal("ratio", "ten turns merged, the time over that of a row each", 0.4, at_most=True),
    Goal("search_share", "samples of one turn: the search's part of the time", 0.03, at_most=True),
)


@dataclass(frozen=True, slots=True)
class Options:
    """``tokens``: of a turn; ``between``: of the prompt in front of it that no turn generated."""

    rounds: int = 9
    trajectories: int = 2
    turns: int = 10
    tokens: int = 64
    between: int = 64
    hidden: int = 256
    layers: int = 2


def trajectories(options: Options, count: int, seed: int = 0) -> list[Sample]:
    """The samples of ``count`` trajectories, in the order in which they come to the trainer."""
    rng = random.Random(seed)
    samples = []
    for trajectory in range(count):
        history: tuple[int, ...] = ()
        for turn in range(options.turns):
            prompt = history + _tokens(rng, options.between)
            answer = _tokens(rng, options.tokens)
            samples.append(_sample(turn, trajectory, prompt, answer))
            history = prompt + answer
    return samples


def apart(samples: Sequence[Sample]) -> list[Sample]:
    """The same with another first token in each prompt."""
    return [
        replace(sample, prompt_tokens=(number % _VOCABULARY, *sample.prompt_tokens[1:]))
        for number, sample in enumerate(samples)
    ]


def single_turns(options: Options, count: int) -> list[Sample]:
    """Samples with prompts and answers of ``options``, and no prefix."""
    rng = random.Random(1)
    samples = [
        _sample(0, number, _tokens(rng, options.between), _tokens(rng, options.tokens))
        for number in range(count)
    ]
    return apart(samples)


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(_VOCABULARY) for _ in range(count))


def _sample(turn: int, trajectory: int, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Sample:
    return Sample(
        sample_id=f"1:q_{turn}_{trajectory}",
        agent=_AGENT,
        step=1,
        policy_version=0,
        group="1:q",
        reward=1.0,
        advantage=1.0,
        prompt_tokens=prompt,
        tokens=answer,
        logprobs=(-8.3,) * len(answer),
    )


def make_policy(options: Options) -> TorchPolicy:
    """A policy of a small model with random weights."""
    model = {
        "model_type": "qwen3",
        "hidden_size": options.hidden,
        "intermediate_size": 4 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": options.hidden // 4,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 8192,
    }
    setup = PolicySetup(
        model=ModelConfig(config=model, tokenizer="unused"),
        credit={_AGENT: CreditConfig(name="dapo")},
        loss=LossConfig(name="dapo", ratio_deviation_warning=1e9),  # the samples are made up
    )
    return TorchPolicy(PolicyName("policy"), setup, seed=0, total_steps=10)


def merged_share(samples: Sequence[Sample], micro_batch: int) -> float:
    """The share of tokens that is not computed if the trainer gets the samples in micro-batches."""
    every = computed = 0
    for start in range(0, len(samples), micro_batch):
        part = samples[start : start + micro_batch]
        rows = TokenRows.of([(sample.prompt_tokens, sample.tokens) for sample in part], _VOCABULARY)
        every += int(rows.lengths.sum())
        computed += int(rows.merged()[0].lengths.sum())
    return 1 - computed / every


def _backward_s(policy: TorchPolicy, samples: Sequence[Sample]) -> float:
    started = perf_counter()
    policy.accumulate(samples)
    return perf_counter() - started


def _search_s(samples: Sequence[Sample]) -> float:
    rows = TokenRows.of([(sample.prompt_tokens, sample.tokens) for sample in samples], _VOCABULARY)
    started = perf_counter()
    rows.merged()
    return perf_counter() - started


async def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured."""
    report("how busy the machine is with other things")
    described = await machine.describe()
    report(f"{options.rounds} pairs of micro-batches")
    with one_torch_thread():
        figures = _figures(options)
    every = trajectories(options, 64)
    return result_of(
        options,
        figures,
        GOALS,
        described,
        shares={size: rounded(merged_share(every, size)) for size in _MICRO_BATCHES},
    )


def _figures(options: Options) -> dict[str, float]:
    policy, extending = make_policy(options), trajectories(options, options.trajectories)
    separate, single = apart(extending), single_turns(options, 64)
    policy.accumulate(extending)
    share = policy.optimizer_step().figures["merged_share"]
    tokens = sum(len(sample.prompt_tokens) + len(sample.tokens) for sample in extending)
    for samples in (separate, single):
        samples[:] = [replace(sample, policy_version=1) for sample in samples]
    extending = [replace(sample, policy_version=1) for sample in extending]
    _backward_s(policy, separate)
    pairs = [(_backward_s(policy, extending), _backward_s(policy, separate)) for _ in range(options.rounds)]
    searches = [_search_s(single) / _backward_s(policy, single) for _ in range(options.rounds)]
    merged_s, apart_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "tokens": tokens,
        "computed_tokens": round(tokens * (1 - share)),
        "merged_share": share,
        "merged_s": merged_s,
        "apart_s": apart_s,
        "ratio": statistics.median(first / second for first, second in pairs),
        "search_share": statistics.median(searches),
    }


def tables(console: Console, result: Mapping[str, Any]) -> None:
    console.print(goals_table("turns that extend each other, in the trainer", result["goals"]))
    shares = ", ".join(f"{size}: {share:.2f}" for size, share in result["shares"].items())
    console.print(
        Text(
            f"{result['computed_tokens']:.0f} of {result['tokens']:.0f} tokens are computed: "
            f"{result['merged_s']:.3f} s, and {result['apart_s']:.3f} s with a row for each turn\n"
            f"share that is not computed, by the samples of a micro-batch: {shares}"
        )
    )
    warn_if_busy(console, result)


@click.command()
@common_options(rounds=9, quick_time="a few seconds")
def merge(as_json: bool, rounds: int | None, quick: bool) -> int:
    """Measure what turns that extend each other save the trainer, and what looking for them costs.

    Forward and backward of trajectories of ten turns of 64 tokens, with 64 tokens between, on one thread of the CPU:
    merged, and beside it in pairs with a row for each turn.

    \b
    Examples:
      scripts/bench/run merge
      scripts/bench/run merge --json > merge.json

    Nothing else should be running on the machine. Progress is on standard error; ctrl-C stops it.
    """
    options = Options(rounds=1, hidden=64, layers=1) if quick else Options()
    options = options if rounds is None else replace(options, rounds=rounds)
    return run_benchmark(partial(measure, options), 2, tables, as_json)
