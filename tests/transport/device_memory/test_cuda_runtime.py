"""CUDA's runtime library is found where wheels have it, and an error says what to do. No library is loaded."""

from pathlib import Path

import pytest

from flexmarl.transport.device_memory.cuda_runtime import load_runtime, runtime_file
from flexmarl.transport.errors import DeviceError


class Loader:
    """Loads the names of ``known`` alone."""

    def __init__(self, *known: str) -> None:
        self._known = known
        self.tried: list[str] = []

    def __call__(self, name: str) -> str:
        self.tried.append(name)
        if name not in self._known:
            raise OSError(f"{name}: cannot open shared object file")
        return name


def test_the_library_that_pytorch_has_loaded_comes_first(tmp_path: Path) -> None:
    loader = Loader("libcudart.so.13")
    assert load_runtime("13", [tmp_path], loader) == "libcudart.so.13" and len(loader.tried) == 1


@pytest.mark.parametrize("name", ["libcudart.so.13", "libcudart.so.13.0.96", "libcudart-0123abcd.so.13"])
def test_else_the_folders_of_wheels_are_searched(tmp_path: Path, name: str) -> None:
    file = tmp_path / "b" / name
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    file.touch()
    (tmp_path / "b" / "libcudart.so.12").touch()
    loader = Loader(str(file))
    assert load_runtime("13", [tmp_path / "a", tmp_path / "b"], loader) == str(file)
    assert str(tmp_path / "b" / "libcudart.so.12") not in loader.tried, "of another version"


def test_without_it_the_error_says_what_was_searched_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DeviceError) as raised:
        load_runtime("13", [tmp_path], Loader())
    for part in ("libcudart.so.13", str(tmp_path), "LD_LIBRARY_PATH", "weights.path=shm"):
        assert part in str(raised.value)


def test_the_file_that_is_loaded_is_read_from_the_map_of_the_process() -> None:
    maps = """7f00-7f01 r-xp 00000000 08:01 11 /usr/lib/libc.so.6
7f02-7f03 r-xp 00000000 08:01 12 /venv/lib/nvidia/cu13/lib/libcudart.so.13
7f04-7f05 rw-p 00000000 00:00 0
"""
    assert runtime_file(maps) == "/venv/lib/nvidia/cu13/lib/libcudart.so.13"
    with pytest.raises(DeviceError, match="no file"):
        runtime_file("7f04-7f05 rw-p 00000000 00:00 0 [heap]")
