"""The key of a service that may open sessions."""

import secrets
from pathlib import Path
from typing import Final

from ...actors.errors import ConfigError
from ...actors.gateway.model_call import ApiError
from ...core.durable.files import replace_private
from ...core.errors import UnsafeKeys
from ...core.wire.curve import read_private

_SHORTEST: Final = 16


def check_key(key: str, expected: bytes) -> None:
    """Raises ApiError for another key than that of services."""
    if not secrets.compare_digest(key.encode(), expected):
        raise ApiError(401, "the key is not the one of gateway.key_file", code="invalid_api_key")


def service_key(key_file: Path | None, place: Path) -> str:
    """The key in ``key_file``; None: that in ``place``, which is made if it is missing: a resumed run keeps its key.
    Raises ConfigError for a file that others may read, one that can't be read, and a key that could be guessed."""
    if key_file is None and not place.exists():
        key = f"fm-{secrets.token_urlsafe(32)}"
        replace_private(place, key.encode())
        return key
    path = key_file or place
    try:
        key = read_private(path).decode().strip()
    except (OSError, UnicodeDecodeError, UnsafeKeys) as error:
        raise ConfigError(f"gateway.key_file={path}: {error}") from None
    if len(key) < _SHORTEST or not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            f"gateway.key_file={path}: a key is one word of {_SHORTEST} or more ASCII characters"
        )
    return key
