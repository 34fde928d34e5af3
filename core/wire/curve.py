"""Access over TCP: the CURVE keys of a run, the gate that admits clients by their keys, the rule for plain TCP.

- A server proves itself by its key pair, a client by its own; all traffic between them is encrypted (CurveZMQ,
  https://rfc.zeromq.org/spec/26/).
- CURVE by itself admits every client that knows the server's *public* key. The ``Gate``, which libzmq asks over ZAP
  (https://rfc.zeromq.org/spec/27/), decides which clients are admitted.
- Everything fails closed: without a gate a protected socket admits no client, and the gate refuses unknown keys.
"""

import asyncio
import dataclasses
import errno
import ipaddress
import json
import os
import re
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.utils import z85

from ..durable.files import replace_private
from ..errors import InvalidKeys, PlainTcpRefused, UnsafeKeys
from ..telemetry import BoundedLog, get_logger
from .permissions import DEFAULT_CALLS, checked_calls

log = get_logger(__name__)

# --------------------------------------------------------------------------- keys

_KEY_CHARACTERS: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85: RFC 32
MAX_FILE_BYTES: Final = 64 * 1024  # about 1400 allowed clients


@dataclass(frozen=True, slots=True)
class Keys:
    """CURVE keys of one side of a run. Each key is text: its 32 bytes in the encoding Z85, 40 characters.

        keys = Keys.for_client(server_public)                            # on a machine outside, from the service's key
        await system.allow(keys.client_public, calls=["store"])          # in the service, which got this public key
        async with ActorSystem("client", keys=keys) as client:           # outside again
            store = client.ref("store", address, StoreApi)

    The nodes of a run share one file, whose server key pair and client key pair they all use. A client from outside
    gets its own with ``for_client``: it has only the public key of the server, ``server_secret`` is None.
    Raises InvalidKeys if a key is malformed, or a public key does not belong to its secret one.
    """

    server_public: str
    client_public: str
    client_secret: str = field(repr=False)
    server_secret: str | None = field(default=None, repr=False)
    allowed: frozenset[str] = frozenset()  # public keys of the clients that the server admits
    # The rules about the calls of some of them (``permissions.py``). The holders of ``client_secret``, which are the
    # nodes of the run, may make every call, and the others those of ``DEFAULT_CALLS``.
    calls: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_key("server_public", self.server_public)
        _check_pair("client", self.client_public, self.client_secret)
        if self.server_secret is not None:
            _check_pair("server", self.server_public, self.server_secret)
        for key in self.allowed:
            _check_key("allowed", key)
        for key, rules in self.calls.items():
            _check_key("calls", key)
            checked_calls(rules)

    @classmethod
    def make(cls) -> "Keys":
        """New keys for a run, whose server admits the client that holds them."""
        server_public, server_secret = _new_pair()
        client_public, client_secret = _new_pair()
        return cls(server_public, client_public, client_secret, server_secret, frozenset({client_public}))

    @classmethod
    def for_client(cls, server_public: str) -> "Keys":
        """New keys for a client from outside. It is admitted once its ``client_public`` is allowed at the server."""
        return cls(server_public, *_new_pair())

    def allowing(self, public_key: str, calls: Iterable[str] = DEFAULT_CALLS) -> "Keys":
        """A copy that admits one more client, for ``calls``. Raises InvalidKeys, and ValueError for an invalid rule."""
        rules = checked_calls(calls)
        rules_of = {**self.calls, public_key: rules}
        if rules == DEFAULT_CALLS:
            del rules_of[public_key]
        return dataclasses.replace(self, allowed=self.allowed | {public_key}, calls=rules_of)

    def save(self, path: Path | str) -> None:
        """Writes the file, readable by this user alone; it appears whole or not at all. Raises OSError.

        Raises InvalidKeys if there are too many allowed clients for ``load`` to accept the file.
        """
        content = self.to_json()
        if len(content) > MAX_FILE_BYTES:
            raise InvalidKeys(f"{len(self.allowed)} allowed clients make a file over {MAX_FILE_BYTES} bytes")
        replace_private(Path(path), content.encode("ascii"))

    def to_json(self) -> str:
        """The content of a file of keys: a secret."""
        fields = {**dataclasses.asdict(self), "allowed": sorted(self.allowed), "calls": dict(self.calls)}
        return json.dumps(fields, indent=2) + "\n"

    @classmethod
    def load(cls, path: Path) -> "Keys":
        """Reads a file of ``save``. Raises UnsafeKeys if others may have read or written it, or its content is invalid.

        Raises OSError if it is missing or unreadable.
        """
        return cls.from_json(read_private(path), path)

    @classmethod
    def from_json(cls, content: bytes, path: Path) -> "Keys":
        """The keys of ``to_json``, which come from ``path``. Raises UnsafeKeys if the content is invalid."""
        remedy = "make new keys, or copy the file again from where it is whole"
        try:
            fields = json.loads(content)
        except (ValueError, RecursionError):  # no "from": the error would quote the file, secrets and all
            raise UnsafeKeys(path, "it is not JSON", remedy) from None
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(fields, dict) or sorted(fields) != sorted(names):
            raise UnsafeKeys(path, f"it is not an object of {', '.join(names)}", remedy)
        allowed = fields["allowed"]
        if not _is_list_of_texts(allowed):
            raise UnsafeKeys(path, "allowed is not a list of keys", remedy)
        calls = fields["calls"]
        if not isinstance(calls, dict) or not all(map(_is_list_of_texts, calls.values())):
            raise UnsafeKeys(path, "calls is not an object with a list of rules for each key", remedy)
        try:
            rules_of = {key: checked_calls(rules) for key, rules in calls.items()}
            return cls(**{**fields, "allowed": frozenset(allowed), "calls": rules_of})
        except (InvalidKeys, ValueError) as error:
            raise UnsafeKeys(path, str(error), remedy) from None


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _new_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode("ascii"), secret.decode("ascii")


def _check_key(name: str, key: Any) -> None:
    # The error names the field and never the key: it may be a secret.
    if not isinstance(key, str) or not _KEY_CHARACTERS.fullmatch(key):
        raise InvalidKeys(f"{name} is not a key: 40 characters of Z85")
    try:
        z85.decode(key)
    except struct.error:  # five characters of Z85 can spell a little more than the four bytes they stand for
        raise InvalidKeys(f"{name} is not a key: five of its characters are more than 32 bits") from None


def _check_pair(whose: str, public: Any, secret: Any) -> None:
    _check_key(f"{whose}_public", public)
    _check_key(f"{whose}_secret", secret)
    if zmq.curve_public(secret.encode("ascii")) != public.encode("ascii"):
        raise InvalidKeys(f"{whose}_public does not belong to {whose}_secret")


def read_private(path: Path) -> bytes:
    """The bytes of a small file that only this user can read or write. Raises UnsafeKeys, OSError."""
    try:
        # O_NONBLOCK: a pipe of that name without a writer must not block
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafeKeys(path, "it is a symbolic link", "name the file itself") from None
        raise
    status = os.fstat(descriptor)  # of the open file: the name may mean another file by now
    if not stat.S_ISREG(status.st_mode):  # a folder can be opened, but Python makes no file of it
        os.close(descriptor)
        raise UnsafeKeys(path, "it is not a regular file", "name a file that Keys.save wrote")
    with os.fdopen(descriptor, "rb") as file:
        if status.st_uid != os.geteuid():
            raise UnsafeKeys(
                path,
                f"it belongs to user {status.st_uid}, not {os.geteuid()}",
                "make new keys as this user, or copy the file with `install -m 600`",
            )
        if status.st_mode & 0o077:
            raise UnsafeKeys(
                path,
                f"its mode is {stat.S_IMODE(status.st_mode):04o}, open to other users",
                f"`chmod 600 {path}` if no other user can have read it, else make new keys",
            )
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise UnsafeKeys(
            path, f"it is larger than {MAX_FILE_BYTES} bytes", "name a file that Keys.save wrote"
        )
    return content


# --------------------------------------------------------------------------- sockets

_DOMAIN: Final = "flexmarl"


def protect_server(socket: "zmq.Socket[bytes]", keys: Keys) -> None:
    """Makes a socket, before it binds, accept only clients that its context's ``Gate`` admits.

    Raises InvalidKeys if ``keys`` are a client's.
    """
    if keys.server_secret is None:
        raise InvalidKeys("these are a client's keys: a server needs server_secret too, from Keys.make()")
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.server_secret)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
    # Without this libzmq admits every client while no ZAP handler answers (zmq_setsockopt(3)).
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def protect_client(socket: "zmq.Socket[bytes]", keys: Keys) -> None:
    """Makes a socket, before it connects, prove its identity and talk to the holder of the server's secret key only.

    Only the socket's monitor reports the outcome (zmq_socket_monitor(3)), as measured with libzmq 4.3.5: a client that
    the gate refuses gets HANDSHAKE_FAILED_AUTH (value 400) at once, and its socket never tries again; one that expects
    another server gets HANDSHAKE_FAILED_NO_DETAIL, and its socket tries again for ever.
    """
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.client_public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.client_secret)


# --------------------------------------------------------------------------- the gate

_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"
# After this many questions other callbacks of the loop get their turn.
_DRAIN_BUDGET: Final = 64


class Gate:
    """Admits clients to the protected sockets of one ``zmq.Context``, on the running loop.

    Start it before the sockets bind; close it before the context is terminated. Closing the gate ends no connection.

    zmq.auth.Authenticator is not used: it admits every client of the NULL mechanism by default, does not pass the
    client's address to its callback (so that refusals could not be distinguished), and is a coroutine for work that
    never waits.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", allowed: Iterable[str]) -> None:
        """``allowed``: public keys, such as ``Keys.allowed``. Raises InvalidKeys."""
        self._context = context
        self._allowed: set[bytes] = set()
        self._refusals = BoundedLog(log, lines=1)
        self.admitted = 0
        """Connections, each time they are made; so is ``denied``."""
        self.denied = 0
        self._socket: zmq.Socket[bytes] | None = None
        for key in allowed:
            self.allow(key)

    def start(self) -> None:
        """Raises zmq.ZMQError (EADDRINUSE) if the context has a gate already."""
        self._loop = asyncio.get_running_loop()
        socket = self._context.socket(zmq.REP)
        try:
            socket.bind(_ZAP_ADDRESS)
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        self._socket = socket
        self._loop.add_reader(socket.FD, self._drain)

    def close(self) -> None:
        """Admits no new client from now on. Can be repeated."""
        if self._socket is not None:
            socket, self._socket = self._socket, None
            self._loop.remove_reader(socket.FD)
            socket.unbind(_ZAP_ADDRESS)  # at once, where close() leaves it to libzmq's thread
            socket.close(linger=0)
        self._refusals.close()

    def allow(self, public_key: str) -> None:
        """Admits one more client, from its next attempt on. Raises InvalidKeys."""
        _check_key("public_key", public_key)
        self._allowed.add(z85.decode(public_key))

    def _drain(self) -> None:
        # The descriptor is edge-triggered: it signals new questions only after a receive has failed with EAGAIN.
        for _ in range(_DRAIN_BUDGET):
            if self._socket is None:  # closed since this was scheduled
                return
            try:
                question = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._socket.send_multipart(self._answer(question), zmq.NOBLOCK)
        self._loop.call_soon(self._drain)

    def _answer(self, question: list[bytes]) -> list[bytes]:
        # RFC 27: version, request id, domain, address, routing id, mechanism, credentials of the mechanism
        match question:
            case [version, request_id, domain, _, _, b"CURVE", key] if (
                version == _ZAP_VERSION and domain == _DOMAIN.encode("ascii") and key in self._allowed
            ):
                self.admitted += 1
                # The last but one becomes the User-Id of every message of the connection.
                return [_ZAP_VERSION, request_id, b"200", b"OK", z85.encode(key), b""]
            case [_, request_id, *_]:
                self._deny(question)
                return [_ZAP_VERSION, request_id, b"400", b"not allowed", b"", b""]
            case _:
                self._deny(question)
                return [_ZAP_VERSION, b"", b"400", b"not allowed", b"", b""]

    def _deny(self, question: list[bytes]) -> None:
        self.denied += 1
        address = b"".join(question[3:4]).decode("ascii", "backslashreplace")
        key = b"".join(question[6:7])
        # By key too: a client that makes a new one for each attempt must not fill the log.
        self._refusals.warning(
            "a client was refused: its public key is not allowed",
            key=f"{address} {key.hex()}",
            address=address,
            denied=self.denied,
            key_prefix=z85.encode(key)[:8].decode("ascii") if len(key) == 32 else "",
            next="if it is yours, allow its client_public: ActorSystem.allow() or Keys.allowing()",
        )


# --------------------------------------------------------------------------- plain TCP

_LOOPBACK: Final = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))


def check_plain_tcp(host: str, *, secured: bool, beyond_loopback: bool) -> None:
    """Raises PlainTcpRefused if plain TCP (``secured`` is false) would leave this machine, to listen or to connect.

    With ``beyond_loopback`` it is logged as a warning instead. Loopback is 127.0.0.0/8, ::1 and localhost;
    any other name may mean any address, and so may ``*``.
    """
    if secured or _is_loopback(host):
        return
    if not beyond_loopback:
        raise PlainTcpRefused(host)
    log.warning(
        "PLAIN TCP BEYOND LOOPBACK: any machine that reaches this address can read all messages, command all actors",
        host=host,
        next="give the system keys (Keys.make()) unless the network is closed to all others",
    )


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return any(address in network for network in _LOOPBACK)
