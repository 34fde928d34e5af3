"""Names of systems and actors: parts of file names and of log lines."""

import re

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def checked_name(name: str) -> str:
    """``name``, if it is valid. Raises ValueError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"invalid name {name!r}: use 1 to 64 letters, digits, '.', '_' and '-', a letter or digit first"
        )
    return name
