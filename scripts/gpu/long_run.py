"""Minutes of training leave memory as it is, and keep the card busy.

Criteria: the resident memory of each process, and the card's, stay as they are over the last two thirds of the steps.
Recorded: tokens/s, the share of the time in which the card computed, the greatest processes. On a card two policies
of plan-path with 0.5B parameters each, in bf16; on a CPU the recipe's own tiny ones, for some seconds.
"""

import json
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression
from typing import Any

from .checks import Card, Check, at_least, at_most
from .models import HALF_BILLION
from .trained import TrainRun, check_end, checks_of_part, closing

_STOPPED = 130
_POLICIES = ("planner", "executor")


@dataclass(frozen=True, slots=True)
class Length:
    """``train_s``: from the start of the process until it is asked to stop. ``stop_s``: for its end, with a
    checkpoint. ``growth_mib``: of a process or the card over the steps that are looked at, by rounding and chance;
    ``growth_share``: of its mean, if that is more."""

    train_s: float
    stop_s: float
    growth_mib: float
    growth_share: float


CARD_LENGTH = Length(180, 55, 64, 0.02)
# In seconds the allocator has not yet kept all that it may keep: 256 MiB (MALLOC_TRIM_THRESHOLD_ of actors).
CPU_LENGTH = Length(45, 60, 320, 0.02)


def run(card: Card) -> Iterator[Check]:
    yield from train_long(card, CARD_LENGTH if card.is_cuda else CPU_LENGTH)


def train_long(card: Card, length: Length) -> Iterator[Check]:
    """Trains for a time, stops, and looks at the figures of the steps."""
    began = time.monotonic()
    large = TrainRun(card, "long", "plan-path", *_settings(card))
    with closing([large]):
        large.wait_for_step(3, began + length.train_s)
        yield Check("seconds until step 3", time.monotonic() - began)
        _let_train(large, began + length.train_s)
        large.process.send_signal(signal.SIGINT)
        yield from checks_of_part(
            "stop", lambda: check_end(large, time.monotonic() + length.stop_s, _STOPPED)
        )
        yield from check_steps(large.metrics, length)


def _let_train(run: TrainRun, until: float) -> None:
    while time.monotonic() < until and run.process.poll() is None:
        time.sleep(0.5)


def _settings(card: Card) -> list[str]:
    settings = ["training.steps=100000", "evaluation.every=0", "checkpoint.every=0"]
    if not card.is_cuda:
        return settings
    shape = HALF_BILLION.config()
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    )  # fmt: skip
    sizes = {name: shape[name] for name in names} | {"head_dim": 64, "initializer_range": 0.02}
    return [
        *settings,
        *(f"agents.{agent}.model.config={json.dumps(sizes)}" for agent in _POLICIES),
        "agent_defaults.model.dtype=bfloat16", "agent_defaults.optimizer.lr=1.0e-5", "agent_defaults.sft.batches=0",
    ]  # fmt: skip


# ----------------------------------------------------------------------- the figures


def check_steps(metrics: Sequence[dict[str, Any]], length: Length) -> Iterator[Check]:
    """Rates over the last two thirds of the steps, and the growth of memory."""
    yield at_least("steps", len(metrics), 6)
    later = metrics[len(metrics) // 3 :]
    seconds = later[-1]["time_s"] - later[0]["time_s"]
    tokens = sum(line["tokens"] for line in later[1:])
    yield Check("seconds of the steps that are looked at", seconds)
    yield Check("trained tokens/s", tokens / seconds)
    yield Check("rollout tokens/s", tokens / sum(line["rollout_s"] for line in later[1:]))
    for policy in _POLICIES:
        for key in ("backward_s", "optimizer_s", "publish_s", "pause_max_s"):
            yield Check(f"{key} of {policy}, mean", fmean(line[f"{key}/{policy}"] for line in later))
    for name in _names(later, "device_busy_percent"):
        yield Check(f"share of time computing, {name}", fmean(line[name] for line in later), "%")
    for kind in ("rss_mib", "device_used_mib"):
        for name in _names(later, kind):
            yield _growth(name, later, length)


def _names(metrics: Sequence[dict[str, Any]], kind: str) -> list[str]:
    return [name for name in metrics[-1] if name.startswith(f"{kind}/")]


def _growth(name: str, metrics: Sequence[dict[str, Any]], length: Length) -> Check:
    """The growth over the steps by the fitted line."""
    points = [(line["time_s"], line[name]) for line in metrics if name in line]
    times, values = zip(*points, strict=True)
    slope, _ = linear_regression(times, values)
    bound = max(length.growth_mib, length.growth_share * fmean(values))
    return at_most(f"growth of {name} from {fmean(values):.0f}", slope * (times[-1] - times[0]), bound, "MiB")
