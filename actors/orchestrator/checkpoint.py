"""Joint checkpoints: the state of all policies and of the data after one step, in one folder or not at all.

    checkpoints/step_000100/
        <agent>/          a Hugging Face checkpoint and the training state, written by the trainer
        run.json          step, data position, versions, evaluations
        manifest.json     size and xxh3 digest of every file; written last

The folder is filled under a name ending in ``.partial`` and renamed when everything in it is on disk: a folder
without that ending is complete, or was damaged later, which its manifest tells.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash
from pydantic import TypeAdapter, ValidationError

from ...core.errors import FlexmarlError

_PARTIAL = ".partial"
_FORMAT = 1


class CheckpointIncomplete(FlexmarlError):
    """A checkpoint lacks a file, or a file is not what was written."""


@dataclass(frozen=True, slots=True)
class RunState:
    """``next_position``: of the training query that the next step begins with."""

    step: int
    next_position: int
    versions: dict[str, int]
    evaluations: dict[int, dict[str, float]]
    format: int = _FORMAT


def partial_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is gathered."""
    return root / f"step_{step:06d}{_PARTIAL}"


def commit(root: Path, state: RunState, keep: int) -> Path:
    """Completes the gathered checkpoint and removes all but the newest ``keep``. Returns its folder."""
    partial = partial_folder(root, state.step)
    _write(partial / "run.json", json.dumps(asdict(state), indent=1))
    _write(partial / "manifest.json", json.dumps({"format": _FORMAT, "files": _digests(partial)}, indent=1))
    folder = partial.with_suffix("")
    if folder.exists():  # the same step, saved by the run that is being resumed
        shutil.rmtree(folder)
    partial.rename(folder)
    _sync_folder(root)
    for old in complete(root)[:-keep]:
        shutil.rmtree(old)
    return folder


def complete(root: Path) -> list[Path]:
    """The committed checkpoints, oldest first."""
    return sorted(p for p in root.glob("step_*") if p.is_dir() and p.suffix != _PARTIAL)


def load(folder: Path) -> RunState:
    """The run's state, once every file has been compared with the manifest.

    Raises CheckpointIncomplete naming the file that is missing or damaged.
    """
    manifest = _read_json(folder / "manifest.json")
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict):
        raise CheckpointIncomplete(f"{folder / 'manifest.json'} is no manifest")
    for name, (size_bytes, digest) in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointIncomplete(f"checkpoint {folder}: {name} is missing")
        if path.stat().st_size != size_bytes:
            raise CheckpointIncomplete(
                f"checkpoint {folder}: {name} has {path.stat().st_size} bytes, {size_bytes} were written"
            )
        if _digest(path) != digest:
            raise CheckpointIncomplete(f"checkpoint {folder}: {name} is damaged (its digest differs)")
    try:
        return TypeAdapter(RunState).validate_python(_read_json(folder / "run.json"))
    except ValidationError as error:
        raise CheckpointIncomplete(f"{folder / 'run.json'}: {error.errors()[0]['msg']}") from error


def remove_partial(root: Path) -> None:
    """Clears what a run that was killed had begun to save."""
    for folder in root.glob(f"step_*{_PARTIAL}"):
        shutil.rmtree(folder)


def _digests(folder: Path) -> dict[str, tuple[int, str]]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): (p.stat().st_size, _digest(p)) for p in files}


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointIncomplete(f"checkpoint {path.parent}: {path.name} is missing") from None
    except ValueError as error:
        raise CheckpointIncomplete(f"checkpoint {path.parent}: {path.name} is damaged: {error}") from None


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
