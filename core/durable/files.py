"""JSON objects in files, and forcing files and folders to the disk.

What must be whole after a crash is written to a folder of its own, synced with ``sync_folder`` and then renamed:
``write_json`` alone promises nothing.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointIncomplete


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes ``content`` as readable JSON, in place and without syncing."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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


def sync_folder(folder: Path) -> None:
    """Forces ``folder`` and every file below it to the disk, so that a rename may announce it afterwards."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Forces one file, or the names in one folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
