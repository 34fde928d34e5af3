"""Measures the bytes that enter a host, and the seconds, of a micro-batch whose ranks are on two hosts.

Two ranks on each of two network namespaces train a policy in bfloat16: divided over all four, and in two replicas. A
micro-batch has one forward of each rank, or several. The keys, by the number of forwards:

    replicas_bytes    bytes that a host receives, for each parameter of the policy; likewise divided_bytes
    replicas_s        seconds of the micro-batch, the medians; likewise divided_s
    predicted_bytes   of replicas: gradients in float32, once, by a ring

Of them: ``bytes_of_predicted``, of the most forwards; ``bytes_growth``, from one forward to the most; ``bytes_share``
and ``time_share``, replicas over divided. Also: parameters, goals, machine, settings.
"""

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import click
import torch
from rich.console import Console
from rich.table import Table

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import ModelConfig, Sample
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.backend_config import TorchTrainerConfig
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import GangRank
from flexmarl.actors.trainer.backends.torch_policy.torch_factory import TorchFactory
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from flexmarl.launch.bench import machine
from flexmarl.launch.bench.command import common_options, run_benchmark
from flexmarl.launch.bench.goals import Goal, judge
from flexmarl.launch.bench.measure import rounded
from flexmarl.launch.bench.namespaces import missing, two_hosts
from flexmarl.launch.bench.result_tables import goals_table, warn_if_busy
from flexmarl.launch.errors import BenchmarkFailed

from .gang_processes import GangProcess

GOALS: Final = (
    Goal("bytes_growth", "replicas: bytes of the most forwards over those of one", 1.1, at_most=True),
    Goal("bytes_of_predicted", "replicas: bytes over the predicted ones", 1.1, at_most=True),
)
_RANKS: Final = 4
_SEED: Final = 3
_AGENT: Final = AgentName("agent")


@dataclass(frozen=True, slots=True)
class Options:
    """``forwards``: of a micro-batch. ``tokens``: of a forward of a rank, one sample."""

    rounds: int = 5
    forwards: Sequence[int] = (1, 2, 4, 8)
    layers: int = 8
    hidden: int = 512
    tokens: int = 64

    def model(self) -> dict[str, Any]:
        return {
            "model_type": "qwen2", "vocab_size": 2048, "hidden_size": self.hidden,
            "intermediate_size": self.hidden * 7 // 2, "num_hidden_layers": self.layers, "num_attention_heads": 8,
            "num_key_value_heads": 8, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None,
            "pad_token_id": None,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Traffic:
    """Figures of a rank by the forwards of a micro-batch: ``received_bytes`` of its host, and ``seconds``."""

    parameters: int
    received_bytes: dict[int, float]
    seconds: dict[int, float]


def measure_rank(gang: GangRank, options: Options) -> Traffic:
    setup = PolicySetup(
        model=ModelConfig(config=options.model(), tokenizer="unused", dtype="bfloat16"),
        credit={_AGENT: CreditConfig()},
        trainer=TorchTrainerConfig(tokens_per_forward=options.tokens),
    )
    policy = TorchFactory(_SEED, 10).build(PolicyName("policy"), setup, gang)
    parameters = sum(
        torch.Size(part.shape).numel() for name, part in policy.parts().items() if name.startswith("model/")
    )
    batches = {count: _samples(count * gang.size, options.tokens) for count in options.forwards}
    policy.accumulate(batches[min(batches)])  # what torch and gloo make once
    received: dict[int, list[int]] = {count: [] for count in batches}
    seconds: dict[int, list[float]] = {count: [] for count in batches}
    for _ in range(options.rounds):
        for count, batch in batches.items():
            gang.sum(torch.zeros(1))
            before, began = received_bytes(), perf_counter()
            policy.accumulate(batch)
            gang.sum(torch.zeros(1))
            seconds[count].append(perf_counter() - began)
            received[count].append(received_bytes() - before)
    return Traffic(
        parameters,
        {count: statistics.median(values) for count, values in received.items()},
        {count: statistics.median(values) for count, values in seconds.items()},
    )


def received_bytes() -> int:
    """Bytes that this thread's host has received, but those that it has sent to itself."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    interfaces = (line.partition(":") for line in lines)
    return sum(int(figures.split()[0]) for name, _, figures in interfaces if name.strip() != "lo")


def _samples(count: int, tokens: int) -> list[Sample]:
    """Each is a forward: its row has ``tokens`` of a prompt and an answer that no other begins with."""
    half = tokens // 2
    return [
        Sample(
            f"1:q_{number}_0", _AGENT, 0, 0, f"1:q_{number}", 1.0, 1.0, (number + 2,) * half, (1,) * (tokens - half),
            (-7.0,) * (tokens - half), 1,
        )
        for number in range(count)
    ]  # fmt: skip


async def measure(options: Options, report: Callable[[str], None]) -> dict[str, Any]:
    """The object that ``--json`` prints. Raises BenchmarkFailed on a machine without network namespaces."""
    described = await machine.describe()
    if (reason := missing()) is not None:
        raise BenchmarkFailed(f"bytes between hosts are counted on network namespaces: {reason}")
    traffic = {}
    with two_hosts() as hosts, GangProcess() as gangs:
        for name, replicas in (("divided", 1), ("replicas", 2)):
            report(f"{_RANKS} ranks, {name}")
            compute = partial(
                gangs.compute, measure_rank, options, ranks=_RANKS, hosts=hosts, replicas=replicas
            )
            traffic[name] = (await asyncio.to_thread(compute))[0]
    return {**figures_of(options, traffic), "machine": described, "settings": asdict(options)}


def figures_of(options: Options, traffic: Mapping[str, Traffic]) -> dict[str, Any]:
    most, replicas, divided = max(options.forwards), traffic["replicas"], traffic["divided"]
    predicted = 8 * (2 - 1) / 2
    figures = {
        "bytes_growth": replicas.received_bytes[most] / replicas.received_bytes[min(options.forwards)],
        "bytes_of_predicted": replicas.received_bytes[most] / replicas.parameters / predicted,
        "bytes_share": replicas.received_bytes[most] / divided.received_bytes[most],
        "time_share": replicas.seconds[most] / divided.seconds[most],
    }
    result: dict[str, Any] = {key: rounded(value) for key, value in figures.items()}
    for name, of_ranks in traffic.items():
        result[f"{name}_bytes"] = {
            count: rounded(size / of_ranks.parameters) for count, size in of_ranks.received_bytes.items()
        }
        result[f"{name}_s"] = {count: rounded(seconds) for count, seconds in of_ranks.seconds.items()}
    goals = [asdict(verdict) for verdict in judge(GOALS, figures)]
    return {**result, "predicted_bytes": predicted, "parameters": replicas.parameters, "goals": goals}


def tables(console: Console, result: Mapping[str, Any]) -> None:
    table = Table(title="a micro-batch on two hosts", title_justify="left", title_style="bold")
    for column in ("forwards", "bytes, replicas", "divided", "seconds, replicas", "divided"):
        table.add_column(column, justify="right")
    keys = ("replicas_bytes", "divided_bytes", "replicas_s", "divided_s")
    for count in result["replicas_bytes"]:
        table.add_row(str(count), *(f"{result[key][count]:.3g}" for key in keys))
    console.print(table)
    console.print(goals_table("bytes a parameter into a host", result["goals"], "bound"))
    warn_if_busy(console, result)


@click.command()
@common_options(rounds=5, quick_time="half a minute")
def replicas(as_json: bool, rounds: int | None, quick: bool) -> int:
    """Measure what a policy's replicas save of the network between two hosts.

    Four ranks on two network namespaces, divided over both or with a replica on each, and the bytes that a host
    receives in micro-batches of one forward and of several.

    \b
    Examples:
      scripts/bench/run replicas
      scripts/bench/run replicas --json > replicas.json

    Needs root, for the namespaces, and 2 GB of memory. Progress is on standard error; ctrl-C stops it.
    """
    options = Options(rounds=rounds or 1, layers=2, hidden=128) if quick else Options(rounds=rounds or 5)
    return run_benchmark(partial(measure, options), 2, tables, as_json)
