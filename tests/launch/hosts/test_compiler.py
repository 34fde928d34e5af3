"""The reasons for which Triton can't compile on a host, seen without a try."""

import sysconfig
from pathlib import Path

import pytest

from flexmarl.launch.hosts import compiler, host_description

from ..fake_nvml import FakeGpu, devices_of


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host with all that is needed; the folder of its programs and headers."""
    for program in ("gcc", "Python.h"):
        (tmp_path / program).touch(mode=0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiler, "find_spec", lambda name: name)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def test_all_is_there(complete: Path) -> None:
    assert compiler.missing_for_compilation() == ""


def test_the_part_that_is_missing_is_named(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (complete / "Python.h").unlink()
    assert compiler.missing_for_compilation() == f"Python's headers are missing ({complete / 'Python.h'})"
    (complete / "gcc").unlink()
    assert compiler.missing_for_compilation() == "there is no C compiler (gcc, clang, or one named by CC)"
    monkeypatch.setenv("CC", "/opt/cc")
    assert compiler.missing_for_compilation().startswith("Python's headers")
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    assert compiler.missing_for_compilation() == "the package triton is not installed"


def test_it_is_looked_for_beside_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_description, "missing_for_compilation", lambda: "no compiler")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu = host_description.describe_host("a", devices_of(FakeGpu("GPU-1")))
    assert gpu.compiler_note == "no compiler"
    assert host_description.describe_host("a", devices_of()).compiler_note == ""
