import os
from pathlib import Path

import pytest
import torch

from flexmarl.actors.errors import CheckpointIncomplete, CheckpointMismatch
from flexmarl.actors.json_files import read_json
from flexmarl.actors.trainer.policy_files import check_tensors, read_tensors_into, write_tensors

TENSORS = {
    "matrix": torch.arange(6.0).reshape(2, 3),
    "scalar": torch.tensor(3.5),
    "bytes": torch.arange(9).byte(),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    write_tensors(tmp_path / "state.safetensors", TENSORS)
    return tmp_path / "state.safetensors"


def test_tensors_come_back_in_place_bit_for_bit(saved: Path) -> None:
    destination = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in destination.items()}
    check_tensors(saved, destination)
    read_tensors_into(saved, destination)
    for name, tensor in destination.items():
        assert torch.equal(tensor, TENSORS[name])
        assert tensor.data_ptr() == addresses[name]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_a_file_is_readable_as_the_umask_says(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "state.safetensors"
    before = os.umask(umask)
    try:
        write_tensors(path, TENSORS)
        first = path.stat().st_mode & 0o777
        path.chmod(0o600)
        write_tensors(path, TENSORS)
    finally:
        os.umask(before)
    assert first == 0o666 & ~umask
    assert path.stat().st_mode & 0o777 == 0o600  # a file that is there keeps its mode


@pytest.mark.parametrize("kept", [0, 5, 60, -1])
def test_a_file_cut_short_is_named(saved: Path, kept: int) -> None:
    saved.write_bytes(saved.read_bytes()[:kept])
    with pytest.raises(CheckpointIncomplete, match=r"state\.safetensors"):
        check_tensors(saved, TENSORS)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for read in (lambda path: check_tensors(path, TENSORS), read_json):
        with pytest.raises(CheckpointIncomplete, match=r"nowhere.*missing"):
            read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"matrix": torch.zeros(3, 2)}, r"matrix: expected F32 \[3, 2\], found F32 \[2, 3\]"),
        ({"scalar": torch.tensor(1, dtype=torch.int64)}, r"scalar: expected I64 \[\], found F32 \[\]"),
        ({"another": torch.zeros(1)}, "another: expected .*found no such tensor"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    saved: Path, change: dict[str, torch.Tensor], words: str
) -> None:
    with pytest.raises(CheckpointMismatch, match=words):
        check_tensors(saved, TENSORS | change)


def test_a_tensor_nobody_expects_is_named(saved: Path) -> None:
    with pytest.raises(CheckpointMismatch, match="matrix: expected no such tensor"):
        check_tensors(saved, {name: TENSORS[name] for name in ("scalar", "bytes")})
