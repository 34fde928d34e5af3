"""Small parts of the report's page: tables, notes, and line charts over the steps."""

from collections.abc import Mapping, Sequence
from html import escape

from .charts import Axes, Line, Point, figure, legend, line_chart, line_swatch, smooth, thin

_POINTS = 400  # at most, per curve: about one per two pixels
_RAW_CURVES = 6  # with more curves the unsmoothed ones hide one another and are left out


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], css: str = "numbers") -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in heads)
    body = []
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        body.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    inside = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="scroll"><table class="{css}">{inside}</table></div>'


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def smoothed_chart(axes: Axes, curves: Mapping[str, Sequence[Point]], steps: int, words: str = "") -> str:
    """Curves over the steps: a running mean over about 4% of ``steps``, and pale behind it the values of every step.

    ``words`` follow the explanation below the chart. A legend comes with two curves or more.
    """
    half_width = max(0, steps // 50)
    lines = []
    for index, (name, points) in enumerate(curves.items()):
        if half_width and len(curves) <= _RAW_CURVES:
            lines.append(Line(name, thin(points, _POINTS), index, raw=True))
        lines.append(Line(name, evenly(smooth(points, half_width)), index))
    caption = (
        f"Bold: running mean over {2 * half_width + 1} steps." if half_width else "Every step as measured."
    )
    if any(line.raw for line in lines):
        caption += " Thin: every step."
    if axes.marks:
        caption += " Dotted vertical lines: the run was resumed."
    if words:
        caption += f" {words}"
    entries = [(line_swatch(index), name) for index, name in enumerate(curves)]
    key = legend(entries) if len(entries) > 1 else ""
    return figure(lambda width: line_chart(axes, lines, width), caption, key)


def evenly(points: Sequence[Point]) -> list[Point]:
    """At most about 400 of the points, evenly spaced, the last among them."""
    stride = max(1, -(-len(points) // _POINTS))
    kept = list(points[::stride])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept
