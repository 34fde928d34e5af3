"""Folders that reach the disk, and files of this user alone."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexmarl.core.durable.files import (
    draft_of,
    make_private,
    make_private_folder,
    open_private,
    replace_private,
    sync_folder,
)


def test_syncing_reaches_every_file_and_the_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("a", "inner/b"):
        (tmp_path / name).write_text("x")
    opened: dict[int, Path] = {}
    synced: list[Path] = []
    real_open = __import__("os").open

    def record_open(path: Path, flags: int) -> int:
        descriptor: int = real_open(path, flags)
        opened[descriptor] = Path(path)
        return descriptor

    monkeypatch.setattr("flexmarl.core.durable.files.os.open", record_open)
    monkeypatch.setattr("flexmarl.core.durable.files.os.fsync", lambda fd: synced.append(opened[fd]))
    sync_folder(tmp_path)
    assert set(synced) == {tmp_path, tmp_path / "a", tmp_path / "inner", tmp_path / "inner/b"}
    assert synced[-1] == tmp_path


class TestPrivate:
    @pytest.fixture(params=[0o000, 0o022, 0o077], autouse=True)
    def umask(self, request: pytest.FixtureRequest) -> Iterator[None]:
        before = os.umask(request.param)
        yield
        os.umask(before)

    def test_files_and_folders_are_this_users_alone(self, tmp_path: Path) -> None:
        make_private_folder(tmp_path / "a" / "b")
        with open_private(tmp_path / "a" / "text", "a") as file:
            file.write("ä")
        replace_private(tmp_path / "a" / "b" / "whole.json", b"{}")
        found = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
        assert set(found.values()) == {0o700, 0o600} and [path.name for path in found if path.is_file()]
        assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in found.items())
        assert (tmp_path / "a" / "text").read_text(encoding="utf-8") == "ä"

    def test_what_a_library_has_written_becomes_so(self, tmp_path: Path) -> None:
        (tmp_path / "folder" / "inner").mkdir(parents=True)
        (tmp_path / "folder" / "inner" / "file").touch()
        (tmp_path / "other").touch(mode=0o644)
        (tmp_path / "folder" / "link").symlink_to(tmp_path / "other")
        before = (tmp_path / "other").stat().st_mode
        make_private(tmp_path / "folder")
        assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "folder" / "inner" / "file").stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "other").stat().st_mode == before

    @pytest.mark.parametrize("mode", ["w", "a", "ab", "wb"])
    @pytest.mark.parametrize("there", [True, False])
    def test_a_link_is_not_followed(self, tmp_path: Path, mode: str, there: bool) -> None:
        other = tmp_path / "other"
        if there:
            other.write_text("another's")
        (tmp_path / "file").symlink_to(other)
        with pytest.raises(OSError, match=f"it is a link to {other}, and is not followed: '.*file'"):
            open_private(tmp_path / "file", mode)
        assert other.exists() == there and (not there or other.read_text() == "another's")
        replace_private(tmp_path / "file", b"new")
        assert not (tmp_path / "file").is_symlink() and other.exists() == there


class TestDrafts:
    def test_each_of_two_writers_leaves_a_whole_file(self, tmp_path: Path) -> None:
        file = tmp_path / "keys.json"
        with draft_of(file) as first, draft_of(file) as second:
            first.write_text("the first one's")
            second.write_text("the second's")
            assert not file.exists()
        assert file.read_text() == "the first one's", "its context ended last"
        assert [*tmp_path.iterdir()] == [file] and file.stat().st_mode & 0o777 == 0o600

    def test_one_that_fails_leaves_the_file_as_it_was(self, tmp_path: Path) -> None:
        file = tmp_path / "keys.json"
        replace_private(file, b"old")
        with pytest.raises(KeyError), draft_of(file) as draft:
            draft.write_text("half")
            raise KeyError
        assert file.read_bytes() == b"old" and [*tmp_path.iterdir()] == [file]

    def test_that_of_a_killed_process_is_not_written_to(self, tmp_path: Path) -> None:
        with draft_of(tmp_path / "keys.json") as earlier:
            earlier.chmod(0o666)
            with earlier.open("rb") as reader:
                replace_private(tmp_path / "keys.json", b"secret")
                assert reader.read() == b""
            assert (tmp_path / "keys.json").stat().st_mode & 0o777 == 0o600
