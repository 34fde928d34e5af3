"""Races flexmarl against TRL's GRPOTrainer, seconds per step, in one call and in turns.

Prints one JSON object on stdout and everything else on stderr. The main figure is ``ratio``: the median of flexmarl's
measured steps over the median of TRL's. On a busy machine trust the ratio, not the seconds, and run many short rounds;
``quiet`` compares the fastest tenth of each side's steps, which other load disturbed least.

Both sides train the same model from the same random weights (two layers, hidden 64, 40 characters, untied,
float32) on the same prompts with the same reward function: GRPO without KL, temperature 1, groups of 8, a batch
of 16 completions x 64 new tokens, token-mean loss, one AdamW step per batch. scripts/bench/race/config.yaml
is the configuration of both. The end-of-sequence token lies outside the model's vocabulary, so no completion can
end early; the token count of every step is checked. All prompts have 8 tokens, so neither side pads. Each side has
one torch thread per process, in fresh processes every round, and its first steps of every round are not counted.
A step's seconds run from the end of one step to the end of the next, on both sides.

flexmarl runs as a user runs it: ``flexmarl train``, one agent, one instance, one trainer, each in its own process.

\b
TRL runs at its best for this task:
  one batch per step         num_iterations and gradient_accumulation_steps 1: no second pass for old log-probs
  beta 0                     no reference model
  generation                 transformers' generate with a dynamic KV cache. Measured here, a static cache takes 1.2
                             times as long a step (TRL turns its compilation off), and continuous batching
                             did not get through 16 steps in 100 s
  gradient_checkpointing     off (TRL's default is on), dropout off, float32 instead of bf16 autocast
  optimizer                  the fused AdamW, as flexmarl's
  logging, saving, progress  off; data loader in the process itself, nothing pinned

\b
Examples:
  pip install "flexmarl[bench]"
  scripts/bench/run race_trl
  scripts/bench/run race_trl --steps 20 --rounds 10 > race.json         # on a busy machine
  scripts/bench/run race_trl --steps 10 --rounds 2 --work /tmp/race     # keeps runs, logs, models
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.run_folder.run_history import load_history

RECIPE = Path(__file__).parent / "race"
WARM_UP_STEPS = 5
SIDE_TIMEOUT_S = 1800.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}


class RaceError(Exception):
    """A side failed, or did not do the same work as the other."""


@dataclass(frozen=True, slots=True)
class SideResult:
    """One side's run: seconds, completion tokens and mean reward per step (warm-up included), the gradient norm of the
    first step, and the change of the weights as a share of their norm at the start."""

    seconds: list[float]
    tokens: list[int]
    rewards: list[float]
    grad_norm: float
    weight_change: float

    @property
    def measured(self) -> list[float]:
        return self.seconds[WARM_UP_STEPS:]


@dataclass(frozen=True, slots=True)
class Round:
    first: str
    trl: SideResult
    flexmarl: SideResult


# --------------------------------------------------------------------------- the two sides


def make_model(folder: Path) -> None:
    """Random weights for both sides to start from."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    (policy,) = resolve(str(RECIPE), []).policies.values()
    assert policy.real_model.config is not None
    torch.manual_seed(0)
    auto_model: Any = AutoModelForCausalLM  # half of its methods have no types
    auto_model.from_config(AutoConfig.for_model(**policy.real_model.config)).save_pretrained(folder)


def run_flexmarl(model: Path, steps: int, out: Path) -> SideResult:
    """``steps`` steps by ``flexmarl train``; the run directory is ``out``. Raises RaceError."""
    (name,) = resolve(str(RECIPE), []).agents
    command = [
        sys.executable,
        "-c",
        "import sys; from flexmarl.launch.cli.main import main; sys.exit(main())",
    ]
    command += [
        "train",
        str(RECIPE),
        "--runs",
        str(out.parent),
        "--name",
        out.name,
        f"training.steps={steps}",
    ]
    command += [f"agents.{name}.model.path={model}", f"agents.{name}.model.config=null"]
    _run("flexmarl", command)
    history = load_history(out)
    (trained,) = (out / "checkpoints").glob(f"*/{name}/model.safetensors")
    return SideResult(
        seconds=[step.step_s for step in history.steps],
        tokens=[step.tokens for step in history.steps],
        rewards=[reward for _, reward in history.of_agent(AgentName(name), "reward")],
        grad_norm=history.of_policy(PolicyName(name), "grad_norm")[0][1],
        weight_change=weight_change(model / "model.safetensors", trained),
    )


def run_trl(model: Path, steps: int, out: Path) -> SideResult:
    """``steps`` steps by GRPOTrainer in a process of its own, which writes to ``out``. Raises RaceError."""
    _run("TRL", [sys.executable, str(RECIPE / "trl_side.py"), str(model), str(steps), str(out)])
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    change = weight_change(model / "model.safetensors", out / "model.safetensors")
    return SideResult(**result, weight_change=change)


def _run(side: str, command: Sequence[str]) -> None:
    try:
        subprocess.run(
            command, check=True, stdout=sys.stderr, env={**os.environ, **ENVIRONMENT}, timeout=SIDE_TIMEOUT_S
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise RaceError(f"{side}: {error}") from None


def weight_change(before: Path, after: Path) -> float:
    """``|after - before| / |before|`` over all tensors of two safetensors files. Raises RaceError if their tensors
    differ in name or shape."""
    import numpy as np
    from safetensors.numpy import load_file

    old, new = load_file(before), load_file(after)
    if {k: v.shape for k, v in old.items()} != {k: v.shape for k, v in new.items()}:
        raise RaceError(f"{after} holds other tensors than {before}")
    moved = sum(float(np.square(new[name] - old[name], dtype=np.float64).sum()) for name in old)
    norm = sum(float(np.square(tensor, dtype=np.float64).sum()) for tensor in old.values())
    return float((moved / norm) ** 0.5)


def check_side(side: str, result: SideResult, steps: int, tokens_per_step: int) -> None:
    """Raises RaceError unless ``result`` has ``steps`` steps with the race's tokens, and changed weights."""
    if not len(result.seconds) == len(result.tokens) == len(result.rewards) == steps:
        raise RaceError(f"{side}: {len(result.seconds)} of {steps} steps were measured")
    if set(result.tokens) != {tokens_per_step}:
        raise RaceError(f"{side}: {sorted(set(result.tokens))} tokens a step, not {tokens_per_step}")
    if not (result.grad_norm > 0 and result.weight_change > 0):
        raise RaceError(
            f"{side} did not train: gradient norm {result.grad_norm}, weights moved {result.weight_change}"
        )


# --------------------------------------------------------------------------- the race


def race(work: Path, steps: int, rounds: int) -> list[Round]:
    """``rounds`` rounds of both sides; TRL begins the first, flexmarl the second, and so on."""
    model = work / "model"
    make_model(model)
    tokens = tokens_per_step(resolve(str(RECIPE), []))
    sides: dict[str, Callable[[Path, int, Path], SideResult]] = {"trl": run_trl, "flexmarl": run_flexmarl}
    done = []
    for number in range(1, rounds + 1):
        order = list(sides) if number % 2 else list(reversed(sides))
        results = {}
        for side in order:
            total = WARM_UP_STEPS + steps
            results[side] = sides[side](model, total, work / f"{side}-{number}")
            check_side(side, results[side], total, tokens)
            seconds = median(results[side].measured)
            print(f"round {number}/{rounds}: {side} {seconds:.4f} s per step", file=sys.stderr, flush=True)
        done.append(Round(order[0], **results))
    return done


def tokens_per_step(config: RunConfig) -> int:
    (agent,) = config.agents.values()
    training = config.training
    return training.queries_per_step * training.trajectories_per_query * agent.sampling.max_new_tokens


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """The result: medians over the measured steps of all rounds, and the figures of each round."""
    trl = [seconds for item in rounds for seconds in item.trl.measured]
    flexmarl = [seconds for item in rounds for seconds in item.flexmarl.measured]
    return {
        **_times(median(trl), median(flexmarl)),
        "quiet": _times(_tenth(trl), _tenth(flexmarl)),
        "rounds": [
            {"first": item.first, **_times(median(item.trl.measured), median(item.flexmarl.measured))}
            for item in rounds
        ],
        "training": {
            "trl": [_training_summary(item.trl) for item in rounds],
            "flexmarl": [_training_summary(item.flexmarl) for item in rounds],
        },
    }


def _times(trl: float, flexmarl: float) -> dict[str, float]:
    return {
        "trl_s_per_step": round(trl, 5),
        "flexmarl_s_per_step": round(flexmarl, 5),
        "ratio": round(flexmarl / trl, 4),
    }


def _tenth(seconds: Sequence[float]) -> float:
    """The first decile."""
    return sorted(seconds)[len(seconds) // 10]


def _training_summary(result: SideResult) -> dict[str, float]:
    return {
        "first_reward": round(result.rewards[0], 4),
        "last_reward": round(result.rewards[-1], 4),
        "first_grad_norm": round(result.grad_norm, 4),
        "weight_change": round(result.weight_change, 5),
    }


def surroundings() -> dict[str, Any]:
    versions = {
        name: importlib.metadata.version(name) for name in ("flexmarl", "trl", "transformers", "torch")
    }
    return {
        "versions": {"python": platform.python_version(), **versions},
        "machine": {
            "platform": platform.platform(),
            "cpus": len(os.sched_getaffinity(0)),
            "load_average": [round(load, 2) for load in os.getloadavg()],
        },
    }


@click.command("race_trl", help=__doc__)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=40,
    show_default=True,
    help="Measured steps per round and side.",
)
@click.option("--rounds", type=click.IntRange(1), default=4, show_default=True, help="Even is fairer.")
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    help="A new folder for runs, logs and models. Default: temporary.",
)
def race_trl(steps: int, rounds: int, work: Path | None) -> int:
    if importlib.util.find_spec("trl") is None:
        print('race_trl: TRL is not installed here: pip install "flexmarl[bench]"', file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="race-") as temporary:
        folder = work or Path(temporary)
        try:
            folder.mkdir(parents=True, exist_ok=work is None)
            sides = race(folder.resolve(), steps, rounds)
        except FileExistsError:
            print(f"race_trl: {folder} exists already: name a new folder", file=sys.stderr)
            return 2
        except RaceError as error:
            print(f"race_trl: {error}", file=sys.stderr)
            return 1
    result = summary(sides) | surroundings()
    result |= {"measured_steps_per_round": steps, "warm_up_steps_per_round": WARM_UP_STEPS}
    print(json.dumps(result, indent=2))
    return 0
