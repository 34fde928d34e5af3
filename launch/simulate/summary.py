"""A simulated run in a few figures: its steps, the use of its devices, its transfers, and what bounds a step."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from ...actors.trainer.pool.pool_config import SharedPoolConfig
from ..config.run_config import RunConfig
from ..run_folder.json_lines import read_lines
from .cluster_links import Move, MoveKind
from .simulation import Simulation

_PARTS: Final = {
    "rollout_alone_s": "rollouts: nothing is trained meanwhile",
    "overlap_s": "rollouts and training together",
    "training_alone_s": "training after the last rollout",
    "swaps_exposed_s": "states that move to slots and from them, while nothing is computed",
    "weights_exposed_s": "new weights on their way to the instances, while nothing is computed",
}
_FULL: Final = 0.5
"""The part of a port's bandwidth from which on the summary names it as narrow."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """Seconds of a step in which at least one transfer of a kind was under way; see ``MoveKind``."""

    suspend_s: float = 0.0
    resume_s: float = 0.0
    copy_s: float = 0.0
    publish_s: float = 0.0
    install_s: float = 0.0
    swaps_s: float = 0.0
    """A suspension or a resumption."""
    weights_s: float = 0.0
    """New weights were published or installed."""
    second_s: float = 0.0
    """Second copies of states were made."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Means over the steps. Of three or more the first does not count, which no earlier one overlaps; of several the
    last, in which policies that are complete are saved. A step is the sum of ``rollout_alone_s``, ``overlap_s`` and
    ``after_rollout_s``; the last has ``training_alone_s``, ``swaps_exposed_s`` and ``weights_exposed_s``: seconds after
    the rollouts in which a policy computed or nothing moved, in which states moved and no policy computed, and in which
    new weights alone were on their way.

    ``instances_busy``, ``training_busy``: the shares of the time in which an instance has generated, and in which a
    slot of the training pool has computed. ``prefill_share``, ``decode_share``: of the time of all instances, the parts
    of ``instances_busy``. ``queue_s``: seconds that a turn has waited in its engine. ``swapping_s``: seconds that
    policies of a shared pool were on their way to slots or from them, with their waits, the sum over the policies.
    ``swaps_hidden_s``, ``weights_hidden_s``: the seconds of ``transfers`` that no step has waited for.
    ``busiest_port``, ``port_busy``: the port that has used the largest part of its bandwidth, and that part.
    ``slot_states``: the plan's sentence about the states of a slot.
    """

    steps: int
    step_s: float
    tokens_per_s: float
    rollout_alone_s: float
    overlap_s: float
    after_rollout_s: float
    training_alone_s: float
    swaps_exposed_s: float
    weights_exposed_s: float
    instances: int
    instances_busy: float
    prefill_share: float
    decode_share: float
    slots: int
    training_busy: float
    queue_s: float
    swapping_s: float
    failed_trajectories: float
    transfers: Transfers = Transfers()
    busiest_port: str = ""
    port_busy: float = 0.0
    slot_states: str = ""

    @property
    def swaps_hidden_s(self) -> float:
        """Seconds of a step in which states moved beside computations or rollouts."""
        return max(0.0, self.transfers.swaps_s - self.swaps_exposed_s)

    @property
    def weights_hidden_s(self) -> float:
        """Seconds of a step in which new weights were on their way beside anything else."""
        return max(0.0, self.transfers.weights_s - self.weights_exposed_s)

    @property
    def bound(self) -> str:
        """The longest part of a step, in words."""
        return _PARTS[max(_PARTS, key=lambda part: float(getattr(self, part)))]

    def as_json(self) -> str:
        """One JSON object."""
        hidden = {"swaps_hidden_s": self.swaps_hidden_s, "weights_hidden_s": self.weights_hidden_s}
        return json.dumps({**asdict(self), **hidden, "bound": self.bound})

    def text(self) -> str:
        """Lines for people. Seconds have as many decimals as a short step needs."""
        moves = self.transfers
        places = 1 if self.step_s >= 10 else 2 if self.step_s >= 1 else 3

        def in_s(seconds: float) -> str:
            return f"{seconds:.{places}f}"

        lines = [
            f"{in_s(self.step_s)} s a step, {self.tokens_per_s:.0f} tokens/s (mean of {self.steps} steps)",
            f"  rollouts alone        {in_s(self.rollout_alone_s):>8} s",
            f"  rollouts and training {in_s(self.overlap_s):>8} s",
            f"  after the rollouts    {in_s(self.after_rollout_s):>8} s: training {in_s(self.training_alone_s)}, "
            f"waits for states {in_s(self.swaps_exposed_s)}, for weights {in_s(self.weights_exposed_s)}",
            f"  instances             {self.instances_busy:8.1%} of {self.instances} busy, prefill "
            f"{self.prefill_share:.1%} and decode {self.decode_share:.1%}; a turn waits {in_s(self.queue_s)} s",
            f"  training pool         {self.training_busy:8.1%} of {self.slots} slots busy; "
            f"{in_s(self.swapping_s)} s of swaps",
            f"  states that move      {in_s(moves.swaps_s):>8} s: suspend {in_s(moves.suspend_s)}, resume "
            f"{in_s(moves.resume_s)}; {in_s(self.swaps_hidden_s)} hidden",
            f"  new weights           {in_s(moves.weights_s):>8} s: publish {in_s(moves.publish_s)}, install "
            f"{in_s(moves.install_s)}; {in_s(self.weights_hidden_s)} hidden",
            f"  failed trajectories   {self.failed_trajectories:8.1f}",
            f"The longest part: {self.bound}.",
        ]
        if self.slot_states:
            lines.append(f"By the plan {self.slot_states}.")
        if self.port_busy >= _FULL:
            lines.append(f"The busiest link: {self.busiest_port}, {self.port_busy:.0%} of its bandwidth.")
        return "\n".join(lines)


def summary_of(simulation: Simulation, config: RunConfig) -> Summary:
    """``simulation``: ended, with statistics. ``config``: the simulated one."""
    all_rows, _ = read_lines(simulation.directory.metrics)
    every_s = sum(row["step_s"] for row in all_rows)
    counted = range(len(all_rows))
    counted = counted[1:-1] or counted[:-1] or counted
    rows = [all_rows[step] for step in counted]
    seconds = sum(row["step_s"] for row in rows)
    engines = [figures for figures in simulation.statistics.values() if "engine_decode_s" in figures]
    prefill_s, decode_s = (
        sum(figures[key] for figures in engines) for key in ("engine_prefill_s", "engine_decode_s")
    )
    turns = sum(row[f"turns/{agent}"] for row in all_rows for agent in config.agents)
    is_shared = isinstance(config.pool, SharedPoolConfig)
    # In a shared pool the time of an optimizer step includes the wait for slots.
    computed = ("pool_slots_s",) if is_shared else ("backward_s", "optimizer_s")
    computing_s = _sum(rows, [f"{key}/{name}" for key in computed for name in config.trained])
    slots = config.pool.slot_count if isinstance(config.pool, SharedPoolConfig) else 1
    rollout_s, overlap_s = _sum(rows, ("rollout_s",)), _sum(rows, ("overlap_s",))
    swaps_s, weights_s = _sum(rows, ("swap_s",)), _sum(rows, ("weights_s",))
    links = simulation.links
    port, port_busy = _busiest_port(simulation)
    return Summary(
        steps=len(rows),
        step_s=seconds / len(rows),
        tokens_per_s=_sum(rows, ("tokens",)) / seconds,
        rollout_alone_s=(rollout_s - overlap_s) / len(rows),
        overlap_s=overlap_s / len(rows),
        # Rollouts of a step may begin in the one before.
        after_rollout_s=max(0.0, seconds - rollout_s) / len(rows),
        training_alone_s=max(0.0, seconds - rollout_s - swaps_s - weights_s) / len(rows),
        swaps_exposed_s=swaps_s / len(rows),
        weights_exposed_s=weights_s / len(rows),
        instances=len(engines),
        instances_busy=(prefill_s + decode_s) / (len(engines) * every_s),
        prefill_share=prefill_s / (len(engines) * every_s),
        decode_share=decode_s / (len(engines) * every_s),
        slots=slots,
        training_busy=computing_s / (slots * seconds),
        queue_s=sum(figures["engine_queue_s"] for figures in engines) / max(turns, 1),
        swapping_s=_sum(rows, [f"pool_swapping_s/{name}" for name in config.trained]) / len(rows),
        failed_trajectories=_sum(rows, ("failed_trajectories",)) / len(rows),
        transfers=transfers_of([] if links is None else links.moves, counted),
        busiest_port=port,
        port_busy=port_busy,
    )


def transfers_of(moves: Sequence[Move], steps: range) -> Transfers:
    """The means of ``steps``, counted from 0. A step moves the state that the one before has left, whose version is its
    number, and makes newer weights."""

    def seconds(*kinds: MoveKind) -> float:
        times = (
            (move.begin_s, move.end_s)
            for move in moves
            if move.kind in kinds and move.version - (move.kind not in ("suspend", "resume")) in steps
        )
        return _cover(times) / len(steps)

    kinds: tuple[MoveKind, ...] = ("suspend", "resume", "copy", "publish", "install", "second")
    return Transfers(
        **{f"{kind}_s": seconds(kind) for kind in kinds},
        swaps_s=seconds("suspend", "resume"),
        weights_s=seconds("publish", "install"),
    )


def _cover(times: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of ``times``, begins and ends, lies."""
    covered, at = 0.0, float("-inf")
    for begin, end in sorted(times):
        covered += max(0.0, end - max(begin, at))
        at = max(at, end)
    return covered


def _busiest_port(simulation: Simulation) -> tuple[str, float]:
    """Its name, and the part of its bandwidth that it has used; without links an empty name."""
    if simulation.links is None or not simulation.seconds:
        return "", 0.0
    return next(iter(simulation.links.busy_ports(simulation.seconds).items()))


def _sum(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> float:
    return float(sum(row.get(key, 0.0) for row in rows for key in keys))
