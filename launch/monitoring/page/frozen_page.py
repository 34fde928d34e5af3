"""The report of a run: the page as one file, ``report.html`` in the run's folder, with its modules and data inside.

The file needs no server and no other file. The modules become functions of one script, whose digest the policy of the
file names, so that nothing else can run in it.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path
from typing import Any, Final

from ....core.durable.files import replace_private
from ...errors import RunDirectoryError, SamplesUnreadable
from ...run_folder.samples.reader import Samples, TrajectoryListed
from .curves import points_of
from .panels import PANELS
from .plain import plain
from .recorded_run import RecordedRun
from .trajectories_panel import conversation, listed_row

WEB: Final = Path(__file__).with_name("web")
_POINTS: Final = 240
_FROZEN: Final = {"width": "300"}
"""The parameters of the panels' views: fewer spans than on a screen."""

_EVALUATIONS: Final = 3
_MOST_LISTED: Final = 20_000
_STYLES: Final = ("uplot/uPlot.min.css", "page.css")
_IMPORT: Final = re.compile(r'^import (\w+|\{ [^}]+ \}) from "([^"]+)";$', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ((?:async )?(?:function|class|const)) (\w+)", re.MULTILINE)
_DEFAULT: Final = re.compile(r"^export \{ (\w+) as default \};$", re.MULTILINE)


def write_report(run_dir: Path) -> Path:
    """Writes ``run_dir/report.html`` and returns its path.

    The file appears whole or not at all. Raises OSError if the folder is missing or can't be written; files of the run
    that are missing or half-written leave their parts of the page empty.
    """
    if not run_dir.is_dir():
        raise NotADirectoryError(f"{run_dir} is not a run folder")
    target = run_dir / "report.html"
    replace_private(target, frozen_page(run_dir).encode(errors="replace"))
    return target


def frozen_page(run_dir: Path) -> str:
    """The page of one run as HTML."""
    run = RecordedRun(run_dir, frozen=True)
    try:
        data = plain(_data(run))
    finally:
        run.close()
    script, style = _script(), "".join(_text(name) for name in _STYLES)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    # JSON within HTML: no text of it can end its element or begin another one.
    inert = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = _text("index.html")
    for pattern, replacement in (
        (r'<link rel="icon".*\n', f'<meta http-equiv="content-security-policy" content="{policy}">\n'),
        (r"<title>.*</title>", f"<title>{escape(plain(run.name))} · flexmarl</title>"),
        (r'<link rel="stylesheet".*\n<link rel="stylesheet".*\n', f"<style>{style}</style>\n"),
        (
            r'<script type="module".*\n',
            f'<script type="application/json" id="frozen">{inert}</script>\n<script type="module">{script}</script>\n',
        ),
    ):
        page, count = re.subn(pattern, lambda _, text=replacement: text, page)  # type: ignore[misc]
        assert count == 1, pattern
    return page


# --------------------------------------------------------------------------- data


def _data(run: RecordedRun) -> dict[str, Any]:
    with run.reading():
        views = {panel.name: {"": panel.view(run, _FROZEN)} for panel in PANELS if not panel.reads_samples}
        curves = points_of(run.curves, run.curves.all_keys(), {"points": str(_POINTS)})
    return {
        "facts": {
            "runs": [{"name": run.name, "path": str(run.path)}],
            "panels": [{"name": panel.name, "title": panel.title} for panel in PANELS],
            "revisions": [0],
        },
        "views": [{**views, "trajectories": _trajectories(run)}],
        "curves": [curves],
    }


def _trajectories(run: RecordedRun) -> dict[str, Any]:
    """The best, the median and the worst trajectory of the first, the middle and the last evaluation."""
    try:
        with run.samples() as samples:
            rows = list(dict.fromkeys(_choose(samples)))
            shown = [
                (row, samples.trajectory(row.step, row.evaluation, row.query, row.number)) for row in rows
            ]
    except (SamplesUnreadable, RunDirectoryError) as error:
        return {"": {"total": 0, "words": str(error), "agents": [], "rows": []}}
    listing = [listed_row(row) for row in rows]
    words = (
        "The best, the median and the worst of the first, the middle and the last evaluation" if rows else ""
    )
    conversations = {
        row["name"]: conversation(run, trajectory, with_tokens=False)
        for row, (_, trajectory) in zip(listing, shown, strict=True)
        if trajectory is not None
    }
    return {
        "": {
            "total": len(rows),
            "words": words or "No trajectory of an evaluation is recorded.",
            "agents": [],
            "rows": listing,
        },
        **conversations,
    }


def _choose(samples: Samples) -> Iterator[TrajectoryListed]:
    steps = samples.recorded().evaluations
    count = min(_EVALUATIONS, len(steps))
    places = [round(place * (len(steps) - 1) / max(1, count - 1)) for place in range(count)]
    for step in (steps[place] for place in places):
        ranks = samples.listed(order="best", limit=_MOST_LISTED, step=step, evaluation=True)
        if ranks:
            yield from (ranks[0], ranks[len(ranks) // 2], ranks[-1])


# --------------------------------------------------------------------------- modules


def _script() -> str:
    """All modules as one script: each a function that returns its exports, in the order of their imports."""
    names = sorted(str(path.relative_to(WEB)) for path in WEB.rglob("*.js"))
    needs = {name: {_path(name, other) for _, other in _IMPORT.findall(_text(name))} for name in names}
    needs["main.js"] |= {f"panels/{panel.name}.js" for panel in PANELS}
    parts = ["const modules = {};", "const load = async (path) => modules[path.slice(2)];"]
    parts += [_function(name) for name in TopologicalSorter(needs).static_order()]
    script = "\n".join(parts)
    assert "</script" not in script and "<!--" not in script
    return script


def _function(name: str) -> str:
    source = _text(name)
    # uPlot exports one thing, and has an export of another one in a comment.
    exports = [f"default: {export}" for export in _DEFAULT.findall(source)]
    exports = exports or [export for _, export in _EXPORT.findall(source)]
    source = _IMPORT.sub(lambda match: _binding(name, match), source)
    source = _DEFAULT.sub("", _EXPORT.sub(r"\1 \2", source)).replace("import(", "load(")
    assert not re.search(r"^(import|export)\b", source, re.MULTILINE), name
    return f'modules["{name}"] = (() => {{\n{source}\nreturn {{ {", ".join(exports)} }};\n}})();'


def _binding(name: str, match: re.Match[str]) -> str:
    module = f'modules["{_path(name, match[2])}"]'
    return f"const {match[1]} = {module};" if match[1][0] == "{" else f"const {match[1]} = {module}.default;"


def _path(importer: str, name: str) -> str:
    return str((WEB / importer).parent.joinpath(name).resolve().relative_to(WEB.resolve()))


def _text(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
