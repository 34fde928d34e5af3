"""A simulated run in a few figures: its steps, the use of its devices, and the part of a step that is the longest."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...actors.trainer.pool.pool_config import SharedPoolConfig
from ..config.run_config import RunConfig
from ..run_folder.json_lines import read_lines
from .simulation import Simulation

_PARTS = {
    "rollout_alone_s": "rollouts: nothing is trained meanwhile",
    "overlap_s": "rollouts and training together",
    "after_rollout_s": "training and new weights after the last rollout",
}


@dataclass(frozen=True, slots=True)
class Summary:
    """Means over the steps but the last of several, in which policies that are complete are saved. A step is the sum of
    ``rollout_alone_s``, ``overlap_s`` and ``after_rollout_s``.

    ``instances_busy``, ``training_busy``: the shares of the time in which an instance has generated, and in which a
    slot of the training pool has computed or published weights. ``queue_s``: seconds that a turn has waited in its
    engine. ``swapping_s``: seconds that policies of a shared pool were on their way to slots or from them, the sum
    over the policies.
    """

    steps: int
    step_s: float
    tokens_per_s: float
    rollout_alone_s: float
    overlap_s: float
    after_rollout_s: float
    instances: int
    instances_busy: float
    slots: int
    training_busy: float
    queue_s: float
    swapping_s: float
    failed_trajectories: float

    @property
    def bound(self) -> str:
        """The longest part of a step, in words."""
        return _PARTS[max(_PARTS, key=lambda part: float(getattr(self, part)))]

    def as_json(self) -> str:
        """One JSON object."""
        return json.dumps({**asdict(self), "bound": self.bound})

    def text(self) -> str:
        """Lines for people."""
        return (
            f"{self.step_s:.1f} s a step, {self.tokens_per_s:.0f} tokens/s (mean of {self.steps} steps)\n"
            f"  rollouts alone        {self.rollout_alone_s:8.1f} s\n"
            f"  rollouts and training {self.overlap_s:8.1f} s\n"
            f"  after the rollouts    {self.after_rollout_s:8.1f} s\n"
            f"  instances             {self.instances_busy:8.1%} of {self.instances} busy; "
            f"a turn waits {self.queue_s:.1f} s\n"
            f"  training pool         {self.training_busy:8.1%} of {self.slots} slots busy; "
            f"{self.swapping_s:.1f} s of swaps\n"
            f"  failed trajectories   {self.failed_trajectories:8.1f}\n"
            f"The longest part: {self.bound}."
        )


def summary_of(simulation: Simulation, config: RunConfig) -> Summary:
    """``simulation``: ended, with statistics. ``config``: the simulated one."""
    all_rows, _ = read_lines(simulation.directory.metrics)
    every_s = sum(row["step_s"] for row in all_rows)
    rows = all_rows[:-1] or all_rows
    seconds = sum(row["step_s"] for row in rows)
    engines = [figures for figures in simulation.statistics.values() if "engine_decode_s" in figures]
    busy_s = sum(figures["engine_prefill_s"] + figures["engine_decode_s"] for figures in engines)
    turns = sum(row[f"turns/{agent}"] for row in all_rows for agent in config.agents)
    ranks = {name: policy.trainer.most_ranks for name, policy in config.trained.items()}
    is_shared = isinstance(config.pool, SharedPoolConfig)
    # In a shared pool the time of an optimizer step includes the wait for slots.
    computed = ("pool_computing_s",) if is_shared else ("backward_s", "optimizer_s")
    computing_s = sum(
        count * _sum(rows, [f"{key}/{name}" for key in computed]) for name, count in ranks.items()
    )
    slots = config.pool.slot_count if isinstance(config.pool, SharedPoolConfig) else 1
    rollout_s, overlap_s = _sum(rows, ("rollout_s",)), _sum(rows, ("overlap_s",))
    return Summary(
        steps=len(rows),
        step_s=seconds / len(rows),
        tokens_per_s=_sum(rows, ("tokens",)) / seconds,
        rollout_alone_s=(rollout_s - overlap_s) / len(rows),
        overlap_s=overlap_s / len(rows),
        after_rollout_s=(seconds - rollout_s) / len(rows),
        instances=len(engines),
        instances_busy=busy_s / (len(engines) * every_s),
        slots=slots,
        training_busy=computing_s / (slots * seconds),
        queue_s=sum(figures["engine_queue_s"] for figures in engines) / turns,
        swapping_s=_sum(rows, [f"pool_swapping_s/{name}" for name in ranks]) / len(rows),
        failed_trajectories=_sum(rows, ("failed_trajectories",)) / len(rows),
    )


def _sum(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> float:
    return float(sum(row.get(key, 0.0) for row in rows for key in keys))
