"""Rich's console, as all commands for people use it."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from ....core.base.texts import printable


class Terminal(Console):
    """Prints texts as they are: no ``[red]`` in them is markup, no ``:name:`` an emoji, and control characters are
    shown, also those within tables and ``Text``. A Text loses some (bell, backspace, carriage return) when it is made
    from a string: use ``printable`` first if they shall be seen."""

    def __init__(self, **options: Any) -> None:
        """``options``: of rich's Console."""
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Makes the text of a string: a table's cell has the width of the escapes in it."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """All content passes here; rich's own control codes are marked as such."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
