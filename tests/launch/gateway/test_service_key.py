"""The key of services: made once, kept, and refused if others may read it or guess it."""

from pathlib import Path

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.gateway.service_key import service_key


def test_a_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    place = tmp_path / "gateway.key"
    key = service_key(None, place)
    assert len(key) > 32 and place.stat().st_mode & 0o777 == 0o600
    assert service_key(None, place) == key, "a resumed run keeps it"
    assert service_key(None, tmp_path / "other.key") != key


def test_a_file_has_the_key(tmp_path: Path) -> None:
    file, place = tmp_path / "mine.key", tmp_path / "gateway.key"
    file.touch(mode=0o600)
    file.write_text("a-key-of-my-own-making\n")
    assert service_key(file, place) == "a-key-of-my-own-making"
    assert not place.exists()


@pytest.mark.parametrize(
    "content", [b"short", b"two words and some more", b"\xff" * 20, b"", b"a" * 20 + b"\x07"]
)
def test_a_key_that_could_be_guessed_or_sent_by_no_header_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "mine.key"
    file.touch(mode=0o600)
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"gateway\.key_file"):
        service_key(file, tmp_path / "gateway.key")


def test_a_file_that_others_may_read_or_that_is_missing_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.key"
    file.write_text("a-key-of-my-own-making")
    file.chmod(0o644)
    with pytest.raises(ConfigError) as caught:
        service_key(file, tmp_path / "gateway.key")
    assert "a-key-of-my-own-making" not in str(caught.value)
    with pytest.raises(ConfigError):
        service_key(tmp_path / "none.key", tmp_path / "gateway.key")
