"""Draws charts as SVG text. Pure.

Colours are CSS classes (``c0`` ... ``c7`` and ``grey``); the page defines them for light and dark. Line ``i`` has
colour ``i % 8`` and dash pattern ``i // 8``: 24 lines look different. Numbers must be finite; text is escaped here.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from ..formatting import compact

Point = tuple[float, float]

WIDE, NARROW = 860, 360  # pixels; the page shows the one that fits, so that text is never scaled down
CELL = 420  # of small charts side by side
_HEIGHT, _CELL_HEIGHT = 250, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 12, 44
_COLORS = 8
_DASHES = ("", "7 3", "2 3")


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: ``points`` are (x, y) with x ascending; ``index`` chooses colour and dashes.

    ``raw`` draws it thin and pale, behind the others; ``dots`` marks every point and writes its value. ``dash``: of a
    line that lies on another one, which shows in the gaps.
    """

    name: str
    points: Sequence[Point]
    index: int
    raw: bool = False
    dots: bool = False
    dash: str = ""


@dataclass(frozen=True, slots=True)
class Band:
    """One layer of a stack: a value >= 0 per column, in the unit of the y axis; ``css`` is its colour."""

    name: str
    values: Sequence[float]
    css: str


@dataclass(frozen=True, slots=True)
class Axes:
    """A chart's title, and the labels and ranges of its axes.

    ``name`` is unique on the page (letters, digits, hyphens). ``y_range`` is widened to hold the data;
    without it the axis starts at 0, or at the lowest value below 0. ``marks``: x of vertical lines.
    """

    name: str
    title: str
    description: str
    x_label: str
    y_label: str
    y_range: Point | None = None
    y_format: Callable[[float], str] = compact
    marks: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class _Scale:
    """A linear map from data to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


# --------------------------------------------------------------------------- less data, same picture


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) inside [low, high], about ``count`` of them."""
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def smooth(points: Sequence[Point], half_width: int) -> list[Point]:
    """Centred running mean over 2 * ``half_width`` + 1 points, over those there are at both ends. O(n)."""
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    smoothed = []
    for index, (x, _) in enumerate(points):
        first, end = max(0, index - half_width), min(len(points), index + half_width + 1)
        smoothed.append((x, (sums[end] - sums[first]) / (end - first)))
    return smoothed


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most ``limit`` (>= 4) points that look the same: first, last, lowest and highest of each stretch."""
    if len(points) <= limit:
        return list(points)
    buckets = (limit - 2) // 2
    kept = [points[0]]
    for index in range(buckets):
        stretch = points[index * len(points) // buckets : (index + 1) * len(points) // buckets]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    kept.append(points[-1])
    return kept


def columns(points: Sequence[Point], edges: Sequence[float]) -> list[float]:
    """The mean y of the points with edges[i] <= x < edges[i + 1], 0 without such a point. x ascending."""
    xs = [x for x, _ in points]
    means = []
    for low, high in pairwise(edges):
        inside = points[bisect_left(xs, low) : bisect_left(xs, high)]
        means.append(sum(y for _, y in inside) / len(inside) if inside else 0.0)
    return means


# --------------------------------------------------------------------------- charts


def line_chart(axes: Axes, lines: Sequence[Line], width: int = WIDE) -> str:
    """Curves over a shared x axis, as ``<svg>``; ``data-x`` and ``data-y`` let a script read values back."""
    xs = [x for line in lines for x, _ in line.points] or [0.0]
    ys = [y for line in lines for _, y in line.points] or [0.0]
    x, y = _scales((min(xs), max(xs)), ys, axes, width)
    behind_first = sorted(lines, key=lambda line: (not line.raw, bool(line.dash)))
    curves = "".join(_curve(line, x, y, axes, width) for line in behind_first)
    return _svg(axes, width, curves, x, y)


def column_chart(axes: Axes, edges: Sequence[float], bands: Sequence[Band], width: int = WIDE) -> str:
    """Stacked columns, as ``<svg>``: column ``i`` stands on [edges[i], edges[i + 1]] and holds every band's
    ``values[i]``. Pointing at a column shows its numbers (an SVG ``<title>``).
    """
    totals = [sum(band.values[index] for band in bands) for index in range(len(edges) - 1)]
    x, y = _scales((edges[0], edges[-1]), totals or [0.0], axes, width)
    parts = []
    for index in range(len(edges) - 1):
        start_x, end_x = x(edges[index]), x(edges[index + 1])
        gap = 1.0 if end_x - start_x > 4 else 0.0
        height, base, rects = 0.0, y(0), []
        for band in bands:
            height += band.values[index]
            top = y(height)
            if base - top > 0.02:
                rects.append(
                    f'<rect class="{band.css}" x="{start_x:.1f}" y="{top:.1f}" '
                    f'width="{end_x - start_x - gap:.1f}" height="{base - top:.1f}"/>'
                )
            base = top
        numbers = ", ".join(f"{band.name} {axes.y_format(band.values[index])}" for band in bands)
        label = f"from {axes.x_label} {edges[index]:g}: {numbers} ({axes.y_label})"
        parts.append(f"<g><title>{escape(label)}</title>{''.join(rects)}</g>")
    return _svg(axes, width, "".join(parts), x, y)


def share_bar(name: str, title: str, shares: Sequence[tuple[str, float, str]], width: int = WIDE) -> str:
    """One bar cut into (label, share, CSS class); shares add up to 1. Shares above 6 % carry their number."""
    x, parts = 0.0, []
    for label, share, css in shares:
        size = share * width
        parts.append(
            f'<g><title>{escape(label)}: {share:.1%}</title><rect class="{css}" x="{x:.1f}" y="0" '
            f'width="{max(0.0, size - 1):.1f}" height="30"/>'
        )
        if size > 0.06 * WIDE:
            parts.append(
                f'<text class="on" x="{x + size / 2:.1f}" y="19.5" text-anchor="middle">{share:.0%}</text>'
            )
        parts.append("</g>")
        x += size
    description = ", ".join(f"{label} {share:.1%}" for label, share, _ in shares)
    return (
        f'<svg class="{_size_class(width)}" viewBox="0 0 {width} 30" role="img" '
        f'aria-labelledby="{name}-{width}-t {name}-{width}-d">'
        f'<title id="{name}-{width}-t">{escape(title)}</title>'
        f'<desc id="{name}-{width}-d">{escape(description)}</desc>{"".join(parts)}</svg>'
    )


def same_as(curves: Mapping[str, Sequence[Point]]) -> dict[str, str]:
    """The curves that lie on an earlier one everywhere, with its name: they differ by less than can be seen."""
    ys = [y for points in curves.values() for _, y in points]
    seen = (max(ys) - min(ys)) / 200 if ys else 0.0
    twins: dict[str, str] = {}
    for name, points in curves.items():
        for earlier, candidates in curves.items():
            if earlier == name:
                break
            if earlier not in twins and _alike(points, candidates, seen):
                twins[name] = earlier
                break
    return twins


def _alike(points: Sequence[Point], candidates: Sequence[Point], seen: float) -> bool:
    return len(points) == len(candidates) and all(
        x == other_x and abs(y - other_y) <= seen
        for (x, y), (other_x, other_y) in zip(points, candidates, strict=True)
    )


def cell(draw: Callable[[int], str], title: str, key: str = "") -> str:
    """``draw`` at the width of a cell, with a heading above and a legend (HTML) below, for a grid."""
    return f'<figure class="cell"><h3>{escape(title)}</h3>{draw(CELL)}{key}</figure>'


def figure(draw: Callable[[int], str], note: str = "", key: str = "") -> str:
    """``draw`` at both widths, with a legend (HTML) and a caption (text) below."""
    caption = f"<figcaption>{escape(note)}</figcaption>" if note else ""
    return f"<figure>{draw(WIDE)}{draw(NARROW)}{key}{caption}</figure>"


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """A list of (swatch, label) under a chart; the swatch comes from `line_swatch` or `box_swatch`."""
    items = "".join(f"<li>{swatch}<span>{escape(label)}</span></li>" for swatch, label in entries)
    return f'<ul class="legend">{items}</ul>'


def line_swatch(index: int, dash: str = "") -> str:
    """A short piece of line ``index`` for a legend."""
    return (
        '<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true">'
        f'<path {_stroke("line", index, dash)} d="M1 5H25"/></svg>'
    )


def box_swatch(css: str) -> str:
    """A square in the colour class ``css`` for a legend."""
    square = f'<rect class="{css}" width="10" height="10"/>'
    return f'<svg class="swatch box" viewBox="0 0 10 10" aria-hidden="true">{square}</svg>'


# --------------------------------------------------------------------------- pieces


def _stroke(kind: str, index: int, dash: str = "") -> str:
    """The attributes that give line ``index`` its colour and dashes."""
    dash = dash or _DASHES[index // _COLORS % len(_DASHES)]
    return f'class="{kind} c{index % _COLORS}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _size_class(width: int) -> str:
    return "chart" if width == CELL else "chart narrow" if width <= NARROW else "chart wide"


def _height(width: int) -> int:
    return _CELL_HEIGHT if width == CELL else _HEIGHT


def _scales(x_range: Point, ys: Sequence[float], axes: Axes, width: int) -> tuple[_Scale, _Scale]:
    x_low, x_high = x_range
    if x_low == x_high:  # a single point stands in the middle
        x_low, x_high = x_low - 1, x_high + 1
    low, high = axes.y_range or (min(0.0, min(ys)), max(ys))
    low, high = min(low, min(ys)), max(high, max(ys))
    if high - low <= max(1e-12, 1e-9 * max(abs(low), abs(high))):  # flat: room for ticks that differ
        high = low + max(1.0, abs(low))
    if axes.y_range is None:
        high += 0.06 * (high - low)
    return _Scale(x_low, x_high, _LEFT, width - _RIGHT), _Scale(low, high, _height(width) - _BOTTOM, _TOP)


def _frame(axes: Axes, x: _Scale, y: _Scale, width: int) -> str:
    """Grid, tick labels and axis labels, drawn behind the data."""
    height = _height(width)
    bottom, right, label_x = height - _BOTTOM, width - _RIGHT, _LEFT - 7
    parts = []
    for tick in ticks(y.low, y.high, 5):
        label = escape(axes.y_format(tick))
        parts.append(f'<path class="grid" d="M{_LEFT} {y(tick):.1f}H{right}"/>')
        parts.append(f'<text x="{label_x}" y="{y(tick) + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in ticks(x.low, x.high, width // 90):
        if tick == int(tick):
            parts.append(f'<path class="tick" d="M{x(tick):.1f} {bottom}v4"/>')
            parts.append(f'<text x="{x(tick):.1f}" y="{bottom + 17}" text-anchor="middle">{int(tick)}</text>')
    centre, middle = (_LEFT + right) / 2, (bottom + _TOP) / 2
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>')
    parts.append(f'<text x="{centre}" y="{height - 6}" text-anchor="middle">{escape(axes.x_label)}</text>')
    turned = f'transform="translate(13 {middle}) rotate(-90)"'
    parts.append(f'<text {turned} text-anchor="middle">{escape(axes.y_label)}</text>')
    return "".join(parts)


def _marks(axes: Axes, x: _Scale, width: int) -> str:
    return "".join(
        f'<path class="mark" d="M{x(mark):.1f} {_TOP}V{_height(width) - _BOTTOM}"/>'
        for mark in axes.marks
        if x.low <= mark <= x.high
    )


def _curve(line: Line, x: _Scale, y: _Scale, axes: Axes, width: int) -> str:
    points = " ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in line.points)
    kind = "raw" if line.raw else "line"
    name = "" if line.raw else f' data-name="{escape(line.name, quote=True)}"'
    parts = [f'<polyline {_stroke(kind, line.index, line.dash)}{name} points="{points}"/>']
    if line.dots or len(line.points) == 1:
        css = f"dot c{line.index % _COLORS}"
        for px, py in line.points:
            parts.append(f'<circle class="{css}" cx="{x(px):.1f}" cy="{y(py):.1f}" r="3.5"/>')
    if line.dots and len(line.points) <= width // 90:
        for px, py in line.points:
            side = "start" if x(px) < _LEFT + 30 else "end" if x(px) > width - _RIGHT - 30 else "middle"
            above = -9 if y(py) > _TOP + 22 else 18
            parts.append(
                f'<text class="value" x="{x(px):.1f}" y="{y(py) + above:.1f}" text-anchor="{side}">'
                f"{escape(axes.y_format(py))}</text>"
            )
    return "".join(parts)


def _svg(axes: Axes, width: int, data: str, x: _Scale, y: _Scale) -> str:
    ids = f"{axes.name}-{width}"
    scales = " ".join(
        f'data-{name}="{scale.low:g} {scale.high:g} {scale.start:g} {scale.end:g}"'
        for name, scale in (("x", x), ("y", y))
    )
    return (
        f'<svg class="{_size_class(width)}" viewBox="0 0 {width} {_height(width)}" role="img" '
        f'aria-labelledby="{ids}-t {ids}-d" {scales}><title id="{ids}-t">{escape(axes.title)}</title>'
        f'<desc id="{ids}-d">{escape(axes.description)}</desc>'
        f"{_frame(axes, x, y, width)}{data}{_marks(axes, x, width)}</svg>"
    )
