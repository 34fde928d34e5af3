"""The environment's settings."""

from pathlib import Path

import pytest

from flexmarl.launch import env


def test_the_runtime_directories_are_in_shared_memory_or_in_the_folder_that_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FLEXMARL_RUNTIME_BASE", raising=False)
    assert env.runtime_base() == Path("/dev/shm")
    monkeypatch.setenv("FLEXMARL_RUNTIME_BASE", str(tmp_path))
    assert env.runtime_base() == tmp_path


def test_without_shared_memory_they_are_in_the_folder_for_temporary_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FLEXMARL_RUNTIME_BASE", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert env.runtime_base() == tmp_path


def test_a_process_s_cuda_devices_are_among_those_that_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert env.cuda_devices([2]) == {"CUDA_VISIBLE_DEVICES": "2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-d1,6")
    assert env.cuda_devices([1]) == {"CUDA_VISIBLE_DEVICES": "GPU-d1"}
    assert env.cuda_devices([2, 1]) == {"CUDA_VISIBLE_DEVICES": "6,GPU-d1"}
