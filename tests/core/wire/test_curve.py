"""Keys, keys in files, and where plain TCP may listen."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import zmq
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core.errors import FlexmarlError, InvalidKeys, PlainTcpRefused, UnsafeKeys
from flexmarl.core.wire import curve
from flexmarl.core.wire.curve import Keys, check_plain_tcp

from .keys import KEYS

Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


# --------------------------------------------------------------------------- keys


def test_new_keys_allow_their_own_client_only() -> None:
    keys = Keys.make()
    assert keys.allowed == {keys.client_public}
    assert len({keys.server_public, keys.server_secret, keys.client_public, keys.client_secret}) == 4
    assert keys != Keys.make()


def test_secrets_are_not_shown() -> None:
    assert KEYS.server_public in repr(KEYS)
    assert KEYS.client_secret not in repr(KEYS)
    assert str(KEYS.server_secret) not in repr(KEYS)


def test_an_outside_client_knows_no_secret_of_the_server() -> None:
    outside = Keys.for_client(KEYS.server_public)
    assert (outside.server_public, outside.server_secret, outside.allowed) == (
        KEYS.server_public,
        None,
        frozenset(),
    )
    more = KEYS.allowing(outside.client_public)
    assert more.allowed == {KEYS.client_public, outside.client_public}
    assert KEYS.allowed == {KEYS.client_public}, "the original is unchanged"


@given(
    st.text(Z85, min_size=40, max_size=40) | st.text(Z85 + " é\n", max_size=42) | st.text("$#", min_size=40)
)
def test_a_key_is_what_libzmq_takes_for_one(text: str) -> None:
    def taken(use: Callable[[], object]) -> bool:
        try:
            use()
        except (InvalidKeys, ValueError, zmq.ZMQError):
            return False
        return True

    assert taken(lambda: KEYS.allowing(text)) == taken(lambda: zmq.curve_public(text.encode("utf-8")))


def test_a_public_key_of_another_pair_is_refused() -> None:
    other = Keys.make()
    with pytest.raises(InvalidKeys, match="client_public does not belong") as refused:
        Keys(KEYS.server_public, other.client_public, KEYS.client_secret)
    assert KEYS.client_secret not in str(refused.value)
    with pytest.raises(InvalidKeys, match="server_public does not belong"):
        Keys(other.server_public, KEYS.client_public, KEYS.client_secret, KEYS.server_secret)


# --------------------------------------------------------------------------- the file


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("keys", [KEYS, Keys.for_client(KEYS.server_public)], ids=["run", "client"])
def test_a_file_comes_back_and_is_private(tmp_path: Path, keys: Keys) -> None:
    path = tmp_path / "keys.json"
    before = os.umask(0)
    try:
        keys.save(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Keys.load(path) == keys
    keys.allowing(Keys.make().client_public).save(path)
    assert len(Keys.load(path).allowed) == len(keys.allowed) + 1
    assert names(tmp_path) == ["keys.json"]


def test_saving_replaces_a_link_and_does_not_follow_it(tmp_path: Path) -> None:
    (tmp_path / "keys.json").symlink_to(tmp_path / "elsewhere")
    KEYS.save(tmp_path / "keys.json")
    assert not (tmp_path / "elsewhere").exists()
    assert Keys.load(tmp_path / "keys.json") == KEYS


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "keys.json").mkdir()
    with pytest.raises(OSError):
        KEYS.save(tmp_path / "keys.json")
    assert names(tmp_path) == ["keys.json"]


def test_no_file_is_saved_that_could_not_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KEYS.save(tmp_path / "keys.json")
    monkeypatch.setattr(curve, "MAX_FILE_BYTES", (tmp_path / "keys.json").stat().st_size)
    KEYS.save(tmp_path / "keys.json")
    with pytest.raises(InvalidKeys, match="2 allowed clients"):
        KEYS.allowing(Keys.make().client_public).save(tmp_path / "keys.json")
    assert Keys.load(tmp_path / "keys.json") == KEYS
    assert names(tmp_path) == ["keys.json"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.json"
    KEYS.save(path)
    path.chmod(mode)
    with pytest.raises(UnsafeKeys, match=f"keys.json.*{mode:04o}.*chmod 600"):
        Keys.load(path)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KEYS.save(tmp_path / "keys.json")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnsafeKeys, match=f"belongs to user {os.getuid()}, not {os.getuid() + 1}"):
        Keys.load(tmp_path / "keys.json")


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    KEYS.save(tmp_path / "keys.json")
    (tmp_path / "link").symlink_to(tmp_path / "keys.json")
    with pytest.raises(UnsafeKeys, match="symbolic link"):
        Keys.load(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UnsafeKeys, match="not a regular file"):
        Keys.load(tmp_path / "pipe")
    with pytest.raises(UnsafeKeys, match="not a regular file"):
        Keys.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        Keys.load(tmp_path / "missing")


def changed(**fields: Any) -> bytes:
    good: dict[str, Any] = {
        "server_public": KEYS.server_public,
        "server_secret": KEYS.server_secret,
        "client_public": KEYS.client_public,
        "client_secret": KEYS.client_secret,
        "allowed": [],
        "calls": {},
    }
    return json.dumps({**good, **fields}).encode()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not JSON"),
        (b"\xff" + changed(), "not JSON"),
        (b"[" * 60_000, "not JSON"),
        (b"[]", "not an object of"),
        (b'{"server_public": "x"}', "not an object of"),
        (changed(extra=1), "not an object of"),
        (changed(allowed=KEYS.client_public), "allowed is not a list"),
        (changed(allowed=[["x"]]), "allowed is not a list"),
        (changed(allowed=["x"]), "allowed is not a key"),
        (changed(calls=["*"]), "calls is not an object"),
        (changed(calls={"x": ["*"]}), "calls is not a key"),
        (changed(calls={KEYS.client_public: "*"}), "calls is not an object"),
        (changed(calls={KEYS.client_public: ["a:b:c"]}), "invalid rule 'a:b:c'"),
        (changed(calls={KEYS.client_public: [1]}), "calls is not an object"),
        (changed(client_secret=KEYS.client_secret[:-1]), "client_secret is not a key"),
        (changed(client_secret=None), "client_secret is not a key"),
        (changed(server_public=7), "server_public is not a key"),
        (changed(server_secret=KEYS.client_secret), "server_public does not belong"),
        (changed() + b" " * 64 * 1024, "larger than 65536 bytes"),
    ],
)
def test_a_file_of_anything_else_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UnsafeKeys, match=problem) as refused:
        Keys.load(path)
    assert str(path) in str(refused.value)
    assert KEYS.client_secret not in str(refused.value)
    assert isinstance(refused.value, FlexmarlError)


def test_the_contents_that_the_refused_ones_differ_from_are_taken(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_bytes(changed(allowed=[KEYS.client_public]))
    (tmp_path / "keys.json").chmod(0o600)
    assert Keys.load(tmp_path / "keys.json") == KEYS


# --------------------------------------------------------------------------- plain TCP

LOOPBACK = ["127.0.0.1", "127.255.0.9", "::1", "[::1]", "localhost", "LocalHost"]
BEYOND = [
    "*",
    "0.0.0.0",
    "::",
    "10.0.0.1",
    "128.0.0.1",
    "node7",
    "localhost.example.org",
    "lo",
    "eth0",
    "127.1",
    "",
]


@pytest.mark.parametrize("host", LOOPBACK)
@pytest.mark.parametrize("flag", [True, False])
def test_plain_tcp_on_loopback_is_nothing_special(host: str, flag: bool) -> None:
    with structlog.testing.capture_logs() as lines:
        check_plain_tcp(host, secured=False, beyond_loopback=flag)
    assert lines == []


@pytest.mark.parametrize("host", BEYOND)
def test_plain_tcp_beyond_loopback_takes_a_flag_and_is_loud(host: str) -> None:
    with pytest.raises(PlainTcpRefused, match="Keys.make.*plain_beyond_loopback=True") as refused:
        check_plain_tcp(host, secured=False, beyond_loopback=False)
    assert refused.value.host == host
    with structlog.testing.capture_logs() as lines:
        check_plain_tcp(host, secured=False, beyond_loopback=True)
    assert [(line["log_level"], line["host"]) for line in lines] == [("warning", host)]


@pytest.mark.parametrize("host", [*LOOPBACK, *BEYOND])
def test_with_keys_any_address_will_do(host: str) -> None:
    with structlog.testing.capture_logs() as lines:
        check_plain_tcp(host, secured=True, beyond_loopback=False)
    assert lines == []


def test_keys_are_saved_at_a_path_that_is_a_text(tmp_path: Path) -> None:
    keys, file = Keys.make(), tmp_path / "keys"
    keys.save(str(file))
    assert Keys.load(file) == keys
