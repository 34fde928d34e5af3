"""Sections of the report about time: parts of a step, throughput, processes."""

from collections.abc import Mapping, Sequence

from ....actors.names import PolicyName
from ..formatting import compact, duration
from .charts import Axes, Band, Point, box_swatch, column_chart, columns, figure, legend, share_bar
from .page_parts import grid, note, smoothed_cell, smoothed_chart, table
from .run_history import PARTS, History, Part

_COLUMNS = 60
_PART_COLORS: dict[Part, str] = {
    "rollout only": "c0",
    "rollout and training": "c2",
    "training only": "c1",
    "optimizer": "c5",
    "publishing weights": "c3",
    "other": "grey",
}
_SPLIT_WORDS = (
    "Measured: “rollout and training” is the overlap, the time in which a policy was trained while trajectories were "
    "being generated; “rollout only” is the rest of the rollout. Estimated: the wall time after the rollout is divided "
    "by the policies’ own times (forward/backward beyond the overlap, optimizer, publishing), summed over the policies "
    "and scaled down together if policies worked in parallel. The rest is “other”: waiting, messages, bookkeeping."
)


def time_split(history: History) -> str:
    """The parts of the step time: a bar for the run, columns over the steps, a table, definitions."""
    split = history.time_split()
    totals = {part: sum(y for _, y in split[part]) for part in PARTS}
    whole = sum(totals.values())
    if not whole:
        return ""
    shares = [(part, totals[part] / whole, _PART_COLORS[part]) for part in PARTS]
    entries = [(box_swatch(css), f"{part} {share:.1%}") for part, share, css in shares]
    bar = figure(lambda width: share_bar("share", "Share of step time", shares, width), key=legend(entries))
    steps = len(split["other"])
    rows = [
        [part, f"{1000 * totals[part] / steps:.3g} ms", f"{share:.1%}", duration(totals[part])]
        for part, share, _ in shares
    ]
    parts = table(["part", "per step", "share", "whole run"], rows)
    return f"<h2>Time per step</h2>{bar}{_time_columns(history, split)}{parts}{note(_SPLIT_WORDS)}"


def _time_columns(history: History, split: Mapping[Part, Sequence[Point]]) -> str:
    first, end = split["other"][0][0], split["other"][-1][0] + 1
    number = int(min(_COLUMNS, end - first))
    edges = [float(first + round(index * (end - first) / number)) for index in range(number + 1)]
    bands = [
        Band(part, [1000 * y for y in columns(split[part], edges)], _PART_COLORS[part]) for part in PARTS
    ]
    axes = Axes(
        name="time",
        title="Milliseconds per step, by part",
        description=f"means of {number} ranges of steps; the table below holds the totals",
        x_label="step",
        y_label="ms per step",
        marks=history.resumes,
    )
    per_column = (end - first) / number
    words = f"Each column is the mean of about {per_column:.0f} steps." if per_column > 1 else ""
    return figure(lambda width: column_chart(axes, edges, bands, width), words)


def throughput(history: History) -> str:
    """The section about generated tokens per second, as HTML; empty for a run without a step."""
    points = history.of_step("tokens_per_s")
    if not points:
        return ""
    mean = compact(sum(y for _, y in points) / len(points))
    axes = Axes(
        name="tokens",
        title="Generated tokens per second",
        description=f"mean over the steps: {mean} tokens/s",
        x_label="step",
        y_label="tokens/s",
        marks=history.resumes,
    )
    words = f"Mean over the steps: {mean} tokens/s."
    return f"<h2>Throughput</h2>{smoothed_chart(axes, {'tokens/s': points}, len(history.steps), words)}"


def turn_times(history: History) -> str:
    """Seconds that a turn waits for an instance and is there, by policy: the means of the steps."""
    cells = []
    for title, kind in (("Waiting for an instance", "queue_s"), ("At an instance", "service_s")):
        curves = {
            str(policy): points for policy in history.policies if (points := _per_turn(history, policy, kind))
        }
        if curves:
            ends = ", ".join(f"{policy} {points[-1][1]:.3g} s" for policy, points in curves.items())
            axes = Axes(
                name=kind.replace("_", "-"),
                title=title,
                description=f"at the end: {ends}",
                x_label="step",
                y_label="seconds per turn",
                marks=history.resumes,
            )
            cells.append(smoothed_cell(axes, curves, len(history.steps)))
    return f"<h3>Times of a turn</h3>{grid(cells)}" if cells else ""


def _per_turn(history: History, policy: PolicyName, kind: str) -> list[Point]:
    """Seconds per turn of each step in which turns have ended, from the router's sums since its start."""
    points, before = [], (0.0, 0.0)
    for step in history.steps:
        router = step.by_actor.get("router", {})
        turns, seconds = (router.get(f"policy_{figure}.{policy}") for figure in ("turns", kind))
        if turns is None or seconds is None:
            continue
        if turns < before[0] or seconds < before[1]:  # the run was resumed
            before = (0.0, 0.0)
        if turns > before[0]:
            points.append((float(step.step), (seconds - before[1]) / (turns - before[0])))
            before = (turns, seconds)
    return points


def processes(history: History) -> str:
    """The section about event loops and memory of the processes, GPUs and statistics of actors, as HTML; empty without
    any."""
    rows = []
    for process in history.processes:
        lag = sorted(y for _, y in history.of_process(process, "loop_lag_ms"))
        rss = [y for _, y in history.of_process(process, "rss_mib")]
        lags = (sum(lag) / len(lag), lag[int(0.99 * (len(lag) - 1))], lag[-1]) if lag else ()
        sizes = (rss[0], rss[-1], max(rss)) if rss else ()
        row = [process, *(f"{value:.2f}" for value in lags)] + ["–"] * (3 - len(lags))
        row += [f"{value:.0f}" for value in sizes] + ["–"] * (3 - len(sizes))
        waiting = history.of_process(process, "mailbox_waiting")
        rows.append([*row, f"{max((y for _, y in waiting), default=0.0):g}"])
    if not rows:
        return ""
    heads = ["process", "loop lag, mean ms", "p99 ms", "max ms", "memory, first MiB", "last MiB", "max MiB"]
    heads += ["waiting requests, max"]
    words = "Loop lag: delay of the process's event loop. Memory: resident set size."
    return f"<h2>Processes</h2>{table(heads, rows)}{note(words)}{_devices(history)}{_actors(history)}"


def _devices(history: History) -> str:
    rows = []
    for uuid in history.devices:
        busy = [y for _, y in history.of_device(uuid, "device_busy_percent")]
        used = [y for _, y in history.of_device(uuid, "device_used_mib")]
        mean = f"{sum(busy) / len(busy):.0f}" if busy else "–"
        rows.append([uuid, mean, f"{max(used):.0f}" if used else "–"])
    heads = ["device", "busy, mean %", "memory, max MiB"]
    return f"<h3>Devices</h3>{table(heads, rows)}" if rows else ""


def _actors(history: History) -> str:
    """The figures of all actors after the last step."""
    by_actor = history.steps[-1].by_actor
    if not by_actor:
        return ""
    rows = [
        [actor, figure, compact(value)]
        for actor, figures in by_actor.items()
        for figure, value in figures.items()
    ]
    words = f"Statistics of the actors after step {history.steps[-1].step}"
    return f"<details><summary>{words}</summary>{table(['actor', 'figure', 'value'], rows)}</details>"
