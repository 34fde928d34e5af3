"""JSON objects in the files of a checkpoint.

They promise nothing about crashes: what must be whole after one is written to a folder of its own, synced with
``sync_folder`` (``core/durable/files.py``) and then renamed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import CheckpointIncomplete


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes ``content`` as readable JSON, in place and without syncing."""
    path.write_text(as_text(content), encoding="utf-8")


def as_text(content: Mapping[str, Any]) -> str:
    """The text of a file: equal contents have equal texts, so that a file can be compared."""
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises CheckpointIncomplete when the file is missing, cut short or no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointIncomplete(path, "the file is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointIncomplete(path, f"not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointIncomplete(path, f"holds a {type(content).__name__} where an object belongs")
    return content
