"""``flexmarl train sort-digits`` trains on the card, in both pools, in both types, with adapters, and through kills.

Criteria: the accuracy rises as on a CPU. A static pool's instances get weights by ``cuda_ipc``; those of a shared pool
by ``shm``, since its published weights have to outlive the slot workers. With ``deterministic=true`` a shared pool with
one slot, whose two policies leave it in each step, has the same figures and the same weights as a static one, bit for
bit; so has a run in which the slot worker, an instance and the trainer are killed once each, which ends by itself, with
the documented events. At the end there is no process, no file and no device memory of any run.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from .checks import Card, Check, at_least, at_most, holds
from .processes import wait_ended
from .trained import DeviceMemory, TrainRun, check_end, checks_of_part, closing

_RECIPE = "sort-digits"
LIMIT_S = 240.0
"""Clearly less than the limit of the test's row: a run that is late is named, and the others are checked, before the
test is killed."""
_ENDS_S = 10.0
_CHECKPOINT_STEPS = 3
_EASY = "data={digits: 3, eval_problems: 20}"
"""So few digits that each step has rewards, and policies have gradients."""
_FLOAT32 = "agent_defaults.model.dtype=float32"
_SLACK_BYTES = 64 << 20
"""The driver's own memory may change by a little."""
POLICIES = ("sorter", "checker")
# By policy and step: what no clock decides.
_EXACT = (
    "loss", "entropy", "grad_norm", "advantage_mean", "advantage_std", "ratio_deviation", "reward", "tokens", "samples",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    """``steps``: of the runs whose accuracy counts. ``exact_steps``: of those that are compared bit for bit, in which
    an engine generates one turn at a time. ``limit_s``: for the whole test."""

    steps: int = 20
    adapter_steps: int = 10
    exact_steps: int = 10
    exact_queries: int = 4
    limit_s: float = LIMIT_S


def run(card: Card) -> Iterator[Check]:
    yield from train_all(card, Sizes(limit_s=LIMIT_S * card.limit_factor))


def train_all(card: Card, sizes: Sizes) -> Iterator[Check]:
    """All runs without kills at once, then the one with kills."""
    memory = DeviceMemory(card)
    used_before = memory.used_bytes()
    deadline = time.monotonic() + sizes.limit_s - _ENDS_S
    together = _Together(card, sizes)
    with closing(together.runs):
        # At once: a run takes most of its time to start. The one with kills comes later, alone: it has the deadlines of
        # heartbeats.
        middle = deadline - 0.4 * sizes.limit_s
        yield from checks_of_part("static", lambda: _check_static(together.static, middle, card, sizes))
        yield from checks_of_part("bfloat16", lambda: _check_accuracy(together.bfloat16, middle, 0.2, sizes))
        yield from checks_of_part("adapters", lambda: _check_adapters(together.adapters, middle))
        yield from checks_of_part("exact", lambda: check_end(together.exact, middle))
        yield from checks_of_part("shared", lambda: _check_shared(together, middle))
        yield from checks_of_part("kills", lambda: _check_kills(card, together.exact, sizes, deadline))
    yield from checks_of_part("end", lambda: _check_nothing_left(memory, used_before))


def _exact_settings(sizes: Sizes) -> list[str]:
    return [
        "deterministic=true", f"training={{steps: {sizes.exact_steps}, queries_per_step: {sizes.exact_queries}}}",
        "training.trajectories_per_query=8", "training.micro_batch=8", "evaluation.every=0",
        f"checkpoint.every={_CHECKPOINT_STEPS}", "agent_defaults.sft.batches=50", _EASY, _FLOAT32,
    ]  # fmt: skip


class _Together:
    """The runs that go at once."""

    def __init__(self, card: Card, sizes: Sizes) -> None:
        steps = f"training.steps={sizes.steps}"
        exact = _exact_settings(sizes)
        self.static = TrainRun(card, "static", _RECIPE, steps, _FLOAT32)
        self.bfloat16 = TrainRun(card, "bfloat16", _RECIPE, steps, "agent_defaults.model.dtype=bfloat16")
        self.adapters = TrainRun(
            card, "adapters", _RECIPE, f"training.steps={sizes.adapter_steps}",
            "agent_defaults.lora={rank: 16, alpha: 32}",
            _EASY, "evaluation.every=0", _FLOAT32,
        )  # fmt: skip
        self.exact = TrainRun(card, "exact", _RECIPE, *exact)
        self.shared = TrainRun(card, "shared", _RECIPE, *exact, "pool={name: shared, slots: 1}")
        self.runs = [self.static, self.bfloat16, self.adapters, self.exact, self.shared]


# ----------------------------------------------------------------------- the parts


def _check_static(run: TrainRun, deadline: float, card: Card, sizes: Sizes) -> Iterator[Check]:
    yield from _check_accuracy(run, deadline, 0.3, sizes)
    yield Check("seconds until all actors were ready", run.seconds_until_ready())
    yield check_paths(run, "cuda_ipc" if card.is_cuda else "shm")


def check_paths(run: TrainRun, path: str) -> Check:
    """All instances get their weights by that path."""
    choices = run.events("weights_path_chosen")
    paths = {event["path"] for event in choices}
    refused = [str(event["refused"]) for event in choices if event["refused"]]
    return holds("path of weights", ", ".join([*sorted(paths), *refused]), path, paths == {path})


def _check_accuracy(run: TrainRun, deadline: float, least: float, sizes: Sizes) -> Iterator[Check]:
    yield from check_end(run, deadline)
    metrics = run.metrics
    yield Check("steps/s", len(metrics) / metrics[-1]["time_s"])
    yield at_most("accuracy before", run.events("evaluated")[0]["accuracy"], 0.05)
    yield at_least(f"accuracy after step {sizes.steps}", run.events("evaluated")[-1]["accuracy"], least)
    deviation = max(line[f"ratio_deviation/{policy}"] for line in metrics for policy in POLICIES)
    yield Check("greatest ratio_deviation", deviation)


def _check_adapters(run: TrainRun, deadline: float) -> Iterator[Check]:
    yield from check_end(run, deadline)
    yield from _check_gradients(run)
    files = [_checkpoint(run) / policy / "adapter_model.safetensors" for policy in POLICIES]
    moved = [
        float(tensor.norm())
        for file in files
        for name, tensor in load_file(file).items()
        if "lora_B" in name  # these begin at zero
    ]
    yield holds("least norm of an adapter", min(moved), "> 0", min(moved) > 0)


def _check_shared(together: _Together, deadline: float) -> Iterator[Check]:
    run = together.shared
    yield from check_end(run, deadline)
    yield check_paths(run, "shm")
    yield from _check_gradients(run)
    later = run.metrics[1:]  # the first counts the supervised batches too
    for policy in POLICIES:
        fewest = min(line[f"suspensions/{policy}"] for line in later)
        yield at_least(f"fewest suspensions of {policy} in a step", fewest, 1)
    for state in ("computing", "idle", "swapping", "waiting", "suspended"):
        seconds = sum(line[f"pool_{state}_s/{policy}"] for line in later for policy in POLICIES)
        yield Check(
            f"share of the policies' time: {state}",
            seconds / len(POLICIES) / sum(line["step_s"] for line in later),
        )
    yield from compare(run, together.exact)


def _check_kills(card: Card, like: TrainRun, sizes: Sizes, deadline: float) -> Iterator[Check]:
    run = TrainRun(
        card, "kills", _RECIPE, *_exact_settings(sizes), "pool={name: shared, slots: 1}", "--restarts", "3"
    )
    with closing([run]):
        yield from _kill_each(run, sizes, deadline)
        yield from check_end(run, deadline)
        yield from compare(run, like)
        steps = [line["step"] for line in run.metrics]
        whole = steps == list(range(1, sizes.exact_steps + 1))
        yield holds("steps", " ".join(map(str, steps)), "each once", whole)


def _kill_each(run: TrainRun, sizes: Sizes, deadline: float) -> Iterator[Check]:
    """Kills the slot worker, an instance and the trainer. Each of the first two holds the steps up until it is back."""

    def restarts(actor: str) -> list[str]:
        return [event["reason"] for event in run.events("actor_restarted") if event["actor"] == actor]

    def is_ready_again(actor: str) -> Callable[[], object]:
        return lambda: len(run.ready_times(actor)) > 1

    third = max(1, sizes.exact_steps // 4)
    for number, actor in enumerate(("slot-0", "sorter-0"), 1):
        run.wait_for_step(number * third, deadline)
        began = time.monotonic()
        run.actors()[actor].kill()
        run.wait_until(is_ready_again(actor), f"{actor} is ready again", deadline)
        yield Check(f"{actor}: seconds until it is ready again", time.monotonic() - began)
        yield holds(
            f"{actor}: reason", restarts(actor)[0], "killed by signal 9", "signal 9" in restarts(actor)[0]
        )
    for event in ("slot_lost", "instance_changed"):
        yield at_least(f"events {event}", len(run.events(event)), 1)
    run.wait_for_step(3 * third, deadline)
    run.actors()["trainer"].send_signal(signal.SIGKILL)
    run.wait_until(lambda: run.events("run_resumed"), "the run is resumed", deadline)
    step = run.events("run_resumed")[0]["step"]
    yield holds(
        "run_resumed", f"after step {step}", "after a checkpoint", step > 0 and step % _CHECKPOINT_STEPS == 0
    )


def _check_nothing_left(memory: DeviceMemory, used_before: int | None) -> Iterator[Check]:
    processes = wait_ended(_ENDS_S)
    yield holds("processes left", "; ".join(processes) or "none", "none", not processes)
    if used_before is None:
        return
    deadline = time.monotonic() + _ENDS_S
    while (used := memory.used_bytes() or 0) > used_before + _SLACK_BYTES and time.monotonic() < deadline:
        time.sleep(0.1)
    yield at_most("device memory left", used - used_before, _SLACK_BYTES, "bytes")


def _check_gradients(run: TrainRun) -> Iterator[Check]:
    """All are finite, and no policy stays as it was."""
    norms = {policy: [line.get(f"grad_norm/{policy}", 0.0) for line in run.metrics] for policy in POLICIES}
    finite = all(math.isfinite(norm) for series in norms.values() for norm in series)
    steps = min(sum(norm > 0 for norm in series) for series in norms.values())
    yield holds("steps with a gradient", steps, ">= 2, finite", finite and steps >= 2)


# ----------------------------------------------------------------------- comparison of two runs


def compare(run: TrainRun, like: TrainRun) -> Iterator[Check]:
    """Figures and weights are those of ``like``, bit for bit."""
    differences = [
        f"{key}/{policy} of step {line['step']}: {line.get(f'{key}/{policy}')}, not {reference.get(f'{key}/{policy}')}"
        for line, reference in zip(run.metrics, like.metrics, strict=True)
        for policy in POLICIES
        for key in _EXACT
        if line.get(f"{key}/{policy}") != reference.get(f"{key}/{policy}")
    ]
    first = f"{len(differences)} others, the first: {differences[0]}" if differences else "equal"
    yield holds(f"figures beside those of {like.name}", first, "equal", not differences)
    greatest = max(_greatest_difference(_checkpoint(run), _checkpoint(like), policy) for policy in POLICIES)
    yield at_most(f"weights beside those of {like.name}: greatest difference", greatest, 0.0)


def _checkpoint(run: TrainRun) -> Path:
    """The folder of the newest checkpoint."""
    return max((run.folder / "checkpoints").glob("step_*"))


def _greatest_difference(folder: Path, reference: Path, policy: str) -> float:
    weights, references = (
        load_file(checkpoint / policy / "model.safetensors") for checkpoint in (folder, reference)
    )
    return max(float((weights[name].double() - references[name].double()).abs().max()) for name in references)
