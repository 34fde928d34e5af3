"""The terminal's screen of ``flexmarl top``. Textual draws it; ``overview.py`` makes its content."""

import asyncio
from itertools import accumulate
from typing import ClassVar, Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from ..page.recorded_run import RecordedRun
from .overview import Overview, Section, Views, overview, shorten, views_of

_LOOK_S: Final = 0.5
_GAP: Final = 2
_WIDEST: Final = 40


class TopApp(App[None]):
    """Shows one run until its user leaves. Looks at the run's folder in a thread, twice a second, and draws changes."""

    CSS = "Static { padding: 0 1 1 1; width: 100%; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Leave"),
        Binding("ctrl+c", "quit", "Leave", show=False, priority=True),
    ]

    def __init__(self, run: RecordedRun) -> None:
        super().__init__()
        self._run = run
        self._views: Views | None = None
        """Made again when the run has changed: of 60 steps they take 28 ms, and a look at the folder 0.1 ms."""

    def compose(self) -> ComposeResult:
        """The screen's parts: content that scrolls, and the keys."""
        with VerticalScroll(can_focus=True):
            yield Static("reading the run's folder ...", id="run", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begins to follow the run."""
        self.title = shorten(self._run.name)
        self.run_worker(self._follow(), name="run")

    async def _follow(self) -> None:
        drawn: Overview | None = None
        while True:
            try:
                newest = await asyncio.to_thread(self._read)
            except OSError as error:  # a disk that is away for a while
                self._draw(Section("", lines=[shorten(error)]))
                drawn = None
            else:
                if newest != drawn:
                    self._draw(*newest.sections)
                    drawn = newest
            await asyncio.sleep(_LOOK_S)

    def _read(self) -> Overview:
        with self._run.reading() as run:
            if self._views is None or self._views.revision != run.revision:
                self._views = views_of(run)
            return overview(run, self._views)

    def _draw(self, *sections: Section) -> None:
        parts = [part for section in sections for part in _parts(section)]
        self.query_one("#run", Static).update(Group(*parts))


class _FittingTable:
    """A table without its last columns if the terminal has no room for them. The last one that is shown has the rest of
    the width, and more lines if it needs them."""

    def __init__(self, section: Section) -> None:
        self._section = section
        self._widths = [
            min(_WIDEST, max(map(cell_len, cells)))
            for cells in zip(section.columns, *section.rows, strict=True)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ends = accumulate(width + _GAP for width in self._widths)
        count = max(1, sum(end - _GAP <= options.max_width for end in ends))
        table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
        for column, width in zip(self._section.columns[: count - 1], self._widths, strict=False):
            table.add_column(Text(column), no_wrap=True, max_width=width)
        table.add_column(Text(self._section.columns[count - 1]), overflow="fold")
        for row in self._section.rows:
            table.add_row(*map(Text, row[:count]))
        yield table


def _parts(section: Section) -> list[RenderableType]:
    """The renderables of a section; texts are ``Text``, so that no word of them is markup."""
    if not section.rows and not section.lines:
        return []
    parts: list[RenderableType] = []
    if section.title:
        parts += [Text(), Text(section.title, style="bold")]
    if section.rows:
        parts.append(_FittingTable(section))
    return [*parts, *map(Text, section.lines)]
