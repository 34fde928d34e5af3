"""The file with a run's address and keys."""

from pathlib import Path

import pytest

from flexmarl.core.errors import UnsafeKeys
from flexmarl.core.wire.curve import Keys
from flexmarl.launch.run.run_address import RunAddress


@pytest.mark.parametrize("keys", [None, Keys.make()], ids=["ipc", "tcp"])
def test_it_comes_back_is_private_and_is_removed_at_the_end(tmp_path: Path, keys: Keys | None) -> None:
    path, address = tmp_path / "address", RunAddress("tcp://10.0.0.1:4711", keys)
    path.write_text("of a run that was killed")
    with address.published(path):
        assert path.stat().st_mode & 0o777 == 0o600
        assert RunAddress.load(path) == address
    assert not path.exists()


def test_one_that_others_can_read_or_with_damaged_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "address"
    path.write_text("tcp://10.0.0.1:4711\n{}")
    path.chmod(0o644)
    with pytest.raises(UnsafeKeys, match="0644, open to other users"):
        RunAddress.load(path)
    path.chmod(0o600)
    with pytest.raises(UnsafeKeys, match="not an object of server_public"):
        RunAddress.load(path)


@pytest.mark.parametrize(
    ("content", "problem"), [(b"", "it is empty"), (b"{}", "its first line is not the address")]
)
def test_another_content_is_refused_with_the_file_to_name(content: bytes, problem: str) -> None:
    with pytest.raises(UnsafeKeys, match=f"the keys in - are refused: {problem}.*; name runs/NAME/address"):
        RunAddress.parse(content, Path("-"))
