"""Texts on the page: control characters and those that turn the order of reading are shown, none is obeyed. Pure."""

import re
from html import unescape
from typing import Any, Final

from ....core.base.texts import printable

_LINK: Final = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_TAG: Final = re.compile(r"</?code>")


def plain(value: Any) -> Any:
    """A JSON-able value with harmless texts, keys too. Numbers that are not finite are null, as in JSON."""
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else printable(value)
    if isinstance(value, dict):
        return {plain(str(key)): plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [plain(member) for member in value]
    if isinstance(value, float) and not -1e300 < value < 1e300:
        return None
    if value is None or isinstance(value, bool | int | float):
        return value
    return plain(str(value))


def without_markup(text: str) -> str:
    """A meaning of the table of figures, which is Markdown, as plain text."""
    return unescape(_TAG.sub("", _LINK.sub(r"\1", text))).replace("`", "")
