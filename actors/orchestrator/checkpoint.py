"""Joint checkpoints: the state of all policies and of the data after one step, in one folder or not at all.

    checkpoints/step_000100/
        <policy>/         a Hugging Face checkpoint and the training state, written by the trainer
        run.json          step, versions, evaluations, the states of query sources
        manifest.json     size and xxh3 digest of every other file, and a digest of its own; written last

The state after a step has no other parts: a saved step leaves none of its rows in the store and no query half done
(``pipeline.py``); the work of later steps is repeated. The load of the instances starts at zero, schedules
are a function of the version, random streams are in the training state.

The folder is filled under a name ending in ``.partial`` and renamed when everything in it is on disk: a folder
without that ending is complete, or was damaged later, which its manifest shows. It holds regular files alone, and only
those of its manifest: transformers and ``flexmarl export`` read what lies there, and through a link any file of the
host would be read, or exported as part of a model.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import xxhash
from pydantic import TypeAdapter, ValidationError

from ...core.durable.files import make_private, sync, sync_folder
from ..errors import CheckpointIncomplete
from ..json_files import as_text, read_json, write_json
from ..names import PolicyName, Step, Version
from .opponents.past_pool import PastPool
from .queries.queries_state import QueriesState
from .replay.replay_buffer import ReplayState

PARTIAL = ".partial"
_COMMITTED = re.compile(r"step_\d{6,}")
_FORMAT: Final = 4
_MANIFEST = "manifest.json"
_DIGEST = "digest"
"""The manifest's key for its own digest, which is of its text without that key."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The run after ``step``. ``queries``: the state of their sources. ``opponents``: the pools of past versions.
    ``replay``: the groups that may come again, None in a run without a replay."""

    step: Step
    versions: dict[PolicyName, Version]
    evaluations: dict[int, dict[str, float]]
    queries: QueriesState = field(default_factory=QueriesState)
    opponents: dict[PolicyName, PastPool] = field(default_factory=dict)
    replay: ReplayState | None = None
    format: Literal[4] = _FORMAT


def committed_folder(root: Path, step: Step) -> Path:
    """The folder of a complete checkpoint."""
    return root / f"step_{step:06d}"


def partial_folder(root: Path, step: Step) -> Path:
    """The folder of a checkpoint that is being written."""
    return committed_folder(root, step).with_suffix(PARTIAL)


def commit(root: Path, state: RunState, keep: int) -> Path:
    """Completes the checkpoint of ``state.step`` and removes all but the newest ``keep``. Returns its folder.

    Raises CheckpointIncomplete if something in it is neither a regular file nor a folder.
    """
    partial = partial_folder(root, state.step)
    write_json(partial / "run.json", asdict(state))
    write_json(partial / _MANIFEST, _seal({"format": _FORMAT, "files": _digests(partial)}))
    make_private(partial)
    sync_folder(partial)
    folder = committed_folder(root, state.step)
    partial.rename(folder)
    sync(root)
    for old in complete(root)[:-keep]:
        shutil.rmtree(old)
    return folder


def complete(root: Path) -> list[Path]:
    """The committed checkpoints, oldest first."""
    steps = {int(p.name.removeprefix("step_")): p for p in root.iterdir() if _COMMITTED.fullmatch(p.name)}
    return [steps[step] for step in sorted(steps)]


def load(folder: Path) -> RunState:
    """The run's state, once every file has been compared with the manifest.

    Raises CheckpointIncomplete naming the file that is missing or damaged.
    """
    check_files(folder)
    try:
        return TypeAdapter(RunState).validate_python(read_json(folder / "run.json"))
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise CheckpointIncomplete(folder / "run.json", problem) from error


def policies(folder: Path) -> set[str]:
    """The policies whose files the manifest lists. Raises CheckpointIncomplete as ``check_files``."""
    return {name.partition("/")[0] for name in _listed_files(folder) if "/" in name}


def check_files(folder: Path, policy: PolicyName | None = None) -> None:
    """Compares every file, or those of one policy, with the manifest, and the manifest with its own digest.

    Raises CheckpointIncomplete naming the file that is missing, damaged, not in the manifest, or a link or the like.
    """
    files = _files(folder)
    listed = _listed_files(folder)
    part = f"{policy}/" if policy is not None else ""
    for name in files.keys() - listed.keys() - {_MANIFEST}:
        if name.startswith(part):
            raise CheckpointIncomplete(folder / name, "is not part of the checkpoint: move it elsewhere")
    for name, (size_bytes, digest) in listed.items():
        if not name.startswith(part):
            continue
        path = folder / name
        if name not in files:
            raise CheckpointIncomplete(path, "the file is missing")
        if path.stat().st_size != size_bytes:
            raise CheckpointIncomplete(path, f"has {path.stat().st_size} bytes, {size_bytes} were written")
        if _digest(path) != digest:
            raise CheckpointIncomplete(path, "is damaged (its digest differs from the manifest's)")


def remove_partial(root: Path) -> None:
    """Removes checkpoints that a killed run left incomplete."""
    for folder in root.glob(f"step_*{PARTIAL}"):
        shutil.rmtree(folder)


def _files(folder: Path) -> dict[str, Path]:
    """All files below ``folder``, by their path in it. Raises CheckpointIncomplete if one is not regular."""
    files = {}
    for path in sorted(folder.rglob("*")):  # does not look into a folder that is a link
        if path.is_symlink():
            raise CheckpointIncomplete(path, f"is a link to {path.readlink()}, and is not followed")
        if path.is_file():
            files[str(path.relative_to(folder))] = path
        elif not path.is_dir():
            raise CheckpointIncomplete(path, "is neither a file nor a folder")
    return files


def _listed_files(folder: Path) -> dict[str, tuple[int, str]]:
    """Sizes in bytes and digests, as the manifest has them. Raises CheckpointIncomplete if it is damaged."""
    path = folder / _MANIFEST
    if path.is_symlink():
        raise CheckpointIncomplete(path, f"is a link to {path.readlink()}, and is not followed")
    content = read_json(path)
    # Texts are compared, not digests: blanks, the order and doubled keys are lost in the content, and count too.
    unsealed = {key: value for key, value in content.items() if key != _DIGEST}
    if as_text(_seal(unsealed)).encode() != path.read_bytes():
        raise CheckpointIncomplete(path, "is damaged (its own digest differs)")
    files: dict[str, tuple[int, str]] = content["files"]
    return files


def _seal(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """``manifest`` with the digest of its text."""
    return {**manifest, _DIGEST: xxhash.xxh3_64_hexdigest(as_text(manifest).encode())}


def _digests(folder: Path) -> dict[str, tuple[int, str]]:
    return {name: (path.stat().st_size, _digest(path)) for name, path in _files(folder).items()}


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
