"""The slot ``explorations``: runs of ``sort-digits`` that train 4 trajectories of a query, and the cost of a token in
eight bits.

A run has learned at the first evaluation at which the mean of the agents' rewards is at least ``target``. The arms:

    few        4 trajectories of a query, all trained
    many       16 trajectories of a query, all trained
    explored   16 explorations by instances that compute in eight bits, 4 played again and trained

The keys, of each arm the mean over the seeds:

    ARM_full       generated tokens at full precision until then; a run that does not learn counts with all of its own
    ARM_explored   tokens of explorations until then
    ARM_trained    trained samples until then
    ARM_cost       full tokens and ``token_cost`` of the explored ones
    ratio_few, ratio_many   the cost of ``explored`` over that of the other arm
    unlike         share of the trajectories that were played again and had another reward than their explorations
    token_cost     seconds of a token in eight bits over those of one at full precision, of a model with the hidden size
                   ``hidden_size``, in a batch of 16, on one core; ``tiny_token_cost``: of the model that is trained
    rounds         every seed's

Also: ``versions``, ``settings``. The costs of tokens depend on the machine; the tokens depend on the order in which
rows arrive as little as rounding does.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from flexmarl.launch.bench import machine
from flexmarl.launch.bench.measure import Report, rounded

_LONGEST_S: Final = 3600.0
_EXPLORERS: Final = ", ".join(
    f"{agent}_scout: {{explores: {agent}, engine: {{quantization: int8}}}}" for agent in ("sorter", "checker")
)
ARMS: Final[Mapping[str, tuple[str, ...]]] = {
    "few": ("training.trajectories_per_query=4",),
    "many": ("training.trajectories_per_query=16",),
    "explored": (
        "training.trajectories_per_query=4",
        "rollout.explorations={count: 16}",
        f"policies={{{_EXPLORERS}}}",
    ),
}


@dataclass(frozen=True, slots=True)
class Options:
    """``rounds``: seeds, from ``seed`` on. ``target``: mean reward. ``hidden_size``: of the model whose tokens are
    timed. ``overrides``: settings of the recipe for all arms."""

    rounds: int = 3
    seed: int = 0
    steps: int = 40
    every: int = 4
    queries_per_step: int = 8
    target: float = 0.3
    hidden_size: int = 1024
    overrides: tuple[str, ...] = ()


def learn(folder: Path, options: Options, arm: str, seed: int) -> dict[str, float]:
    """The figures of one run."""
    name = f"{arm}-{seed}"
    settings = (
        f"seed={seed}",
        f"training.steps={options.steps}",
        f"training.queries_per_step={options.queries_per_step}",
        f"training.micro_batch={4 * options.queries_per_step}",
        f"evaluation.every={options.every}",
        "checkpoint.every=0",
        *options.overrides,
        *ARMS[arm],
    )
    run(["train", "sort-digits", "--runs", str(folder), "--name", name, "-q", *settings])
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return figures([json.loads(line) for line in lines], options.target)


def run(arguments: Sequence[str]) -> None:
    """A command of flexmarl, to its end."""
    subprocess.run(
        [Path(sys.executable).with_name("flexmarl"), *arguments],
        check=True,
        timeout=_LONGEST_S,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def figures(lines: Sequence[Mapping[str, Any]], target: float) -> dict[str, float]:
    """Those of the metrics of a run's steps."""
    evaluations = [line for line in lines if "eval/accuracy" in line]
    learned = next((line["step"] for line in evaluations if _reward(line) >= target), None)
    used = [line for line in lines if learned is None or line["step"] <= learned]
    again = sum(line["samples/sorter"] for line in used)
    return {
        "step": learned or 0,
        "full": sum(line["tokens"] for line in used),
        "explored": sum(_of(line, "explored_tokens") for line in used),
        "trained": sum(value for line in used for key, value in line.items() if key.startswith("samples/")),
        "unlike": sum(_of(line, "unlike_explorations") for line in used) / max(1, again),
        "reward": _reward(evaluations[-1]),
    }


def _of(line: Mapping[str, Any], key: str) -> float:
    return float(line.get(key, 0))


def _reward(line: Mapping[str, Any]) -> float:
    return fmean(value for key, value in line.items() if key.startswith("eval/reward/"))


def token_cost(hidden_size: int, layers: int) -> float:
    """Seconds of 16 answers of a quantised engine over those of another one: the median of pairs, on one core."""
    import torch  # imported here: the other slots need nothing of it
    from transformers import AutoConfig, AutoModelForCausalLM

    from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
    from flexmarl.actors.inference.engines.engine import EngineRequest

    torch.set_num_threads(1)
    from_config: Any = AutoModelForCausalLM.from_config
    config = AutoConfig.for_model(
        model_type="qwen3", vocab_size=64, hidden_size=hidden_size, intermediate_size=4 * hidden_size,
        num_hidden_layers=layers, num_attention_heads=hidden_size // 16, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    engines = []
    for quantized in (False, True):
        torch.manual_seed(0)
        model = from_config(config, attn_implementation="sdpa").requires_grad_(False)
        engines.append(TransformersEngine(model, (), max_batch=16, quantized=quantized, prefix_reuse=False))
    ratios = []
    for number in range(5):
        seconds = []
        for engine in engines:
            for place in range(16):
                engine.add(EngineRequest(f"{number} {place}", (1, 2, 3, 4), place, 1.0, 32))
            began = time.perf_counter()
            while engine.pending:
                engine.step()
            seconds.append(time.perf_counter() - began)
        ratios.append(seconds[1] / seconds[0])
    return median(ratios[1:])


def of_rounds(seed: int, rounds: int, *, quick: bool) -> Callable[[Report], dict[str, Any]]:
    """The measurement of ``rounds`` seeds from ``seed`` on. ``quick``: of a few steps, which learn nothing."""
    options = Options(rounds, seed)
    if quick:
        small = ("agent_defaults.sft={batches: 2, batch_size: 8}", "data.eval_problems=16")
        options = replace(options, steps=2, every=2, queries_per_step=2, hidden_size=64, overrides=small)
    return partial(measure, options)


def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured."""
    report("tokens")
    cost, tiny = token_cost(options.hidden_size, 4), token_cost(64, 1)
    rounds = []
    with tempfile.TemporaryDirectory(prefix="explorations-") as folder:
        for seed in range(options.seed, options.seed + options.rounds):
            values: dict[str, float] = {"seed": seed}
            for arm in ARMS:
                report(f"seed {seed}, {arm}")
                learned = learn(Path(folder), options, arm, seed)
                learned["cost"] = learned["full"] + cost * learned["explored"]
                values |= {f"{arm}_{key}": value for key, value in learned.items()}
            rounds.append(values)
    keys = [f"{arm}_{key}" for arm in ARMS for key in ("full", "explored", "trained", "cost")]
    means = {key: fmean(values[key] for values in rounds) for key in keys}
    means |= {f"ratio_{arm}": means["explored_cost"] / means[f"{arm}_cost"] for arm in ("few", "many")}
    means |= {"unlike": fmean(values["explored_unlike"] for values in rounds)}
    means |= {"token_cost": cost, "tiny_token_cost": tiny}
    return {
        **{key: rounded(value) for key, value in means.items()},
        "rounds": [{key: rounded(value) for key, value in values.items()} for values in rounds],
        "versions": machine.versions(),
        "settings": asdict(options),
    }


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Prints the result as a table."""
    target = result["settings"]["target"]
    table = Table(
        "seed", "arm", "step", "full", "explored", "trained", "cost", title=f"tokens to a reward of {target}"
    )
    for values in result["rounds"]:
        for arm in ARMS:
            row = (values[f"{arm}_{key}"] for key in ("step", "full", "explored", "trained", "cost"))
            table.add_row(str(values["seed"]), arm, *(f"{value:g}" for value in row))
    console.print(table)
    cost, tiny, unlike = (result[key] for key in ("token_cost", "tiny_token_cost", "unlike"))
    console.print(
        f"a token in eight bits costs {cost:g} of a full one ({tiny:g} in the model that is trained)"
    )
    console.print(f"{unlike:g} of the trajectories that were played again had another reward")
