"""Measures the memory of a policy that is divided over four ranks, on each of them and on the host.

The keys of the result; lists have a number for each rank:

    build_peak_ratio          the largest of draw and build over what the plan predicts for a rank; likewise
    resume_peak_ratio, forward_peak_ratio, publish_peak_ratio
    build_peak_bytes          from a folder of safetensors in bfloat16
    draw_peak_bytes           from a config alone
    resume_peak_bytes         from a suspended state
    forward_peak_bytes        of a forward and its backward, with the state
    publish_peak_bytes        while weights are gathered, with the state
    whole_model_share         the largest part of the model that one rank had beyond its own rows, of all phases
    shares                    the same of each phase; of a forward and its backward the weights that are gathered
    predicted_bytes           by the plan, for a rank: build, resume, forward, publish, and the state alone
    two_hosts_*_peak_ratio    the same ratios, and the share, of two ranks on each of two network namespaces;
    two_hosts                 the reason without, if this machine has none
    replicas_*_peak_ratio     the same ratios of ranks in two replicas, by the plan of those
    host_bytes_per_parameter  memory of the host for the policy, suspended between two steps, with its published weights
    host_bytes                the same while it is suspended in mid-step, and while a newer state is copied; and the
                              published weights alone
    parameters, goals, machine, settings
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Final

import click
from rich.console import Console
from rich.text import Text

from flexmarl.actors.messages import Moved, SavedRest, SavedWeights, StateBytes, Suspended
from flexmarl.actors.trainer.pool.rank_memory import RankMemory
from flexmarl.actors.trainer.pool.state_hosts import StateHost
from flexmarl.launch.bench import machine
from flexmarl.launch.bench.command import common_options, run_benchmark
from flexmarl.launch.bench.goals import Goal
from flexmarl.launch.bench.measure import rounded
from flexmarl.launch.bench.namespaces import missing, two_hosts
from flexmarl.launch.bench.result_tables import goals_table, warn_if_busy
from flexmarl.launch.bench.results import result_of
from flexmarl.transport.handle import LentMemory, StateHandle

from .gang_processes import GangProcess
from .memory_peaks import MemoryPeaks, measure_memory
from .memory_ratios import PHASES, REPLICAS, TWO_HOSTS, predict, ratio_goals, ratios

GOALS = (
    Goal("whole_model_share", "of the model on one rank beyond its rows, share", 0.15, at_most=True),
    Goal("host_bytes_per_parameter", "memory of the host, bytes for each parameter", 16, at_most=True),
    *ratio_goals(),
)
_PHASES: Final = ("draw", "build", "resume", "forward", "publish")


@dataclass(frozen=True, slots=True)
class Options:
    """The model is about 0.5 GB in float32: many layers, each of them 3 % of it."""

    ranks: int = 4
    layers: int = 32
    hidden: int = 512
    tokens: int = 64

    def model(self) -> dict[str, Any]:
        return {
            "model_type": "qwen2", "vocab_size": 4096, "hidden_size": self.hidden,
            "intermediate_size": self.hidden * 7 // 2, "num_hidden_layers": self.layers, "num_attention_heads": 8,
            "num_key_value_heads": 8, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None,
            "pad_token_id": None,
        }  # fmt: skip


@dataclass(slots=True)
class _CountedMemory:
    """Stands for the lender of memory: counts bytes."""

    lent_bytes: int = 0
    numbers: Iterator[int] = field(default_factory=count)

    async def lend(self, key: str, size_bytes: int, side: int | None = None) -> LentMemory:
        self.lent_bytes += size_bytes
        return LentMemory("process", f"{key}-{next(self.numbers)}", size_bytes, "node")

    async def is_used(self, lent: LentMemory) -> bool:
        return False

    async def take_back(self, lent: Sequence[LentMemory]) -> None:
        self.lent_bytes -= sum(piece.size_bytes for piece in lent)


@dataclass(frozen=True, slots=True)
class HostBytes:
    """Bytes of the host's memory for a state. ``at_rest``: suspended between two steps, ``in_step``: with a gradient;
    ``peak``: while a newer state is copied. ``published``: the weights, a part of each."""

    at_rest: int
    in_step: int
    peak: int
    published: int


async def host_bytes(ranks: Sequence[StateBytes]) -> HostBytes:
    """The bytes that a shared pool lends for a state with these ranks, the only one."""
    memory: Any = _CountedMemory()
    head = StateHost("host", memory, is_head=True)
    spare = head.spare
    states = [RankMemory(head, f"policy-{number}", needed) for number, needed in enumerate(ranks)]
    peak = 0
    for version in (1, 2):
        weights = [_state_in(await state.for_weights(), version) for state in states]
        rests = [_state_in(await state.for_rest(head), version) for state in states]
        peak = max(peak, memory.lent_bytes)
        for state, *handles in zip(states, weights, rests, strict=True):
            state.weights_were_set(SavedWeights(handles[0]))
            state.rest_was_set(SavedRest(handles[1], {}))
    at_rest = memory.lent_bytes - spare.size_bytes
    for state in states:
        state.was_suspended(Suspended(_state_in(await state.for_step(head), 2), {}, Moved(0, "none")))
    in_step = memory.lent_bytes - spare.size_bytes
    return HostBytes(at_rest, in_step, peak, 2 * sum(needed.weights for needed in ranks))


def _state_in(lent: LentMemory, version: int) -> StateHandle:
    return StateHandle("policy", version, 0, 0, (), lent.sources(2 * version))


async def measure(options: Options, report: Callable[[str], None]) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    described = await machine.describe()
    report(f"{options.ranks} ranks")
    model, ranks, tokens = options.model(), options.ranks, options.tokens
    predicted = predict(model, ranks, tokens)
    goals, apart, no_namespaces = (*GOALS, *ratio_goals(REPLICAS)), {}, missing()
    with GangProcess() as gangs:
        measured = partial(measure_memory, gangs, model, ranks, tokens)
        peaks: MemoryPeaks = await asyncio.to_thread(measured)
        report(f"{ranks} ranks in two replicas")
        in_replicas = await asyncio.to_thread(measured, replicas=2)
        if no_namespaces is None:
            report(f"{ranks} ranks on two hosts")
            with two_hosts() as hosts:
                apart = ratios(await asyncio.to_thread(measured, hosts=hosts), predicted, TWO_HOSTS)
            goals = (*goals, *ratio_goals(TWO_HOSTS), replace(GOALS[0], key=f"{TWO_HOSTS}{GOALS[0].key}"))
    hybrid = ratios(in_replicas, predict(model, ranks, tokens, replicas=2), REPLICAS)
    # Without the gaps behind tensors of one number, which are less than 1/100 of a byte.
    host = {
        name: round(size_bytes / peaks.parameters, 2)
        for name, size_bytes in asdict(await host_bytes(peaks.state_bytes)).items()
    }
    figures = {
        **ratios(peaks, predicted),
        **apart,
        **hybrid,
        "host_bytes_per_parameter": host["at_rest"],
    }
    return result_of(
        options,
        figures,
        goals,
        described,
        **{f"{phase}_peak_bytes": getattr(peaks, f"{phase}_peak_bytes") for phase in _PHASES},
        shares={phase: rounded(share) for phase, share in peaks.shares.items()},
        host_bytes=host,
        predicted_bytes={part: getattr(predicted, part) for part in ("state", *PHASES)},
        two_hosts=no_namespaces or "two network namespaces",
        parameters=peaks.parameters,
    )


def tables(console: Console, result: Mapping[str, Any]) -> None:
    console.print(goals_table("a policy on several ranks", result["goals"], "bound"))
    host = result["host_bytes"]
    console.print(
        Text(
            f"host: {host['at_rest']:.2f} bytes for each parameter, {host['published']:.2f} of them published weights; "
            f"in mid-step {host['in_step']:.2f}, while a newer state is copied {host['peak']:.2f}"
        )
    )
    for phase in _PHASES:
        most = max(result[f"{phase}_peak_bytes"]) / result["parameters"]
        console.print(
            Text(f"{phase}: {most:.2f} bytes for each parameter, {result['shares'][phase]:.3f} of the model")
        )
    warn_if_busy(console, result)


@click.command()
@common_options(rounds=1, quick_time="a few seconds")
def memory(as_json: bool, rounds: int | None, quick: bool) -> int:
    """Measure the memory of a policy's ranks while they build, resume, train and publish.

    A model of 0.5 GB on four processes of the CPU, which count the memory of all tensors; again in two replicas, and
    on two hosts, network namespaces, if this machine has them. Peaks stand beside the plan's, of `flexmarl train
    --dry-run`.

    \b
    Examples:
      scripts/bench/run memory
      scripts/bench/run memory --json > memory.json

    Needs 6 GB of memory. Progress is on standard error; ctrl-C stops it.
    """
    options = Options(layers=8, hidden=64) if quick else Options()
    return run_benchmark(partial(measure, options), 2, tables, as_json)
