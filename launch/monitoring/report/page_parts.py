"""Small parts of the report's page: tables, notes, and line charts over the steps."""

from collections.abc import Mapping, Sequence
from html import escape

from .charts import (
    Axes,
    Line,
    Point,
    cell,
    figure,
    legend,
    line_chart,
    line_swatch,
    same_as,
    smooth,
    thin,
)

_POINTS = 400  # at most, per curve: about one per two pixels
_CELL_POINTS = 150
ON_ANOTHER = "6 8"  # dashes of a line that lies on another one
_RAW_CURVES = 6  # with more curves the unsmoothed ones hide one another and are left out


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], css: str = "numbers") -> str:
    """A table as HTML; the first cell of each row is its head. ``css``: the table's class. All texts are escaped."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in heads)
    body = []
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        body.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    inside = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="scroll"><table class="{css}">{inside}</table></div>'


def note(text: str) -> str:
    """A paragraph in small print, as HTML. The text is escaped."""
    return f'<p class="note">{escape(text)}</p>'


def smoothed_chart(axes: Axes, curves: Mapping[str, Sequence[Point]], steps: int, words: str = "") -> str:
    """Curves over the steps: a running mean over about 4% of ``steps``, and pale behind it the values of every step.

    ``words`` follow the explanation below the chart. A legend comes with two curves or more.
    """
    lines, key = _smooth_lines(curves, steps, _POINTS)
    caption = smoothing_words(steps, bool(axes.marks), any(line.raw for line in lines))
    return figure(lambda width: line_chart(axes, lines, width), f"{caption} {words}".rstrip(), key)


def smoothed_cell(axes: Axes, curves: Mapping[str, Sequence[Point]], steps: int) -> str:
    """The same as one of several small charts, without words: ``smoothing_words`` are for all of them."""
    lines, key = _smooth_lines(curves, steps, _CELL_POINTS)
    return cell(lambda width: line_chart(axes, lines, width), axes.title, key)


def grid(cells: Sequence[str]) -> str:
    """Small charts side by side, as many as fit."""
    return f'<div class="grid">{"".join(cells)}</div>' if cells else ""


def smoothing_words(steps: int, resumed: bool, raw: bool = True) -> str:
    """The sentences below charts over ``steps`` steps. ``resumed``: there are lines that mark a resumed run; ``raw``:
    the unsmoothed curves are drawn too."""
    half_width = _half_width(steps)
    words = (
        f"Bold: running mean over {2 * half_width + 1} steps." if half_width else "Every step as measured."
    )
    if raw and half_width:
        words += " Thin: every step."
    return words + (" Dotted vertical lines: the run was resumed." if resumed else "")


def _half_width(steps: int) -> int:
    return max(0, steps // 50)


def _smooth_lines(curves: Mapping[str, Sequence[Point]], steps: int, points: int) -> tuple[list[Line], str]:
    """The lines of a chart over the steps, and its legend."""
    half_width, same = _half_width(steps), same_as(curves)
    lines = []
    for index, (name, values) in enumerate(curves.items()):
        if half_width and len(curves) <= _RAW_CURVES and name not in same:
            lines.append(Line(name, thin(values, points), index, raw=True))
        dash = ON_ANOTHER if name in same else ""
        lines.append(Line(name, evenly(smooth(values, half_width), points), index, dash=dash))
    return lines, named_lines([line for line in lines if not line.raw], same)


def named_lines(lines: Sequence[Line], same: Mapping[str, str]) -> str:
    """The legend of two lines or more. ``same``: as in ``same_as``."""
    entries = [
        (
            line_swatch(line.index, line.dash),
            line.name + (f" (same as {same[line.name]})" if line.name in same else ""),
        )
        for line in lines
    ]
    return legend(entries) if len(entries) > 1 else ""


def evenly(points: Sequence[Point], most: int = _POINTS) -> list[Point]:
    """About ``most`` of the points at most, evenly spaced, the last among them."""
    stride = max(1, -(-len(points) // most))
    kept = list(points[::stride])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept
