"""The security of bulk between hosts: both sides prove that they have the keys of the run.

``encrypted``: TLS 1.3. Each side has the run's ``certificate`` and accepts no other.
Not ``encrypted``, for networks where every machine is trusted: plain TCP. Each side proves by a digest of the other's
random number that it has the run's secret. A machine on the way could read and change the bytes that follow; changes
are noticed by the digests of a state, if they are made by mistake.
"""

import datetime
import functools
import hmac
import os
import secrets
import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zmq.utils import z85

from ...core.errors import InvalidKeys
from ...core.wire.curve import Keys
from ...core.wire.zeromq import check_advertised

if TYPE_CHECKING:
    from cryptography import x509

    from ...core.system import ActorSystem

_NONCE_BYTES = 32
# Sent instead of a proof, so that a reader with other keys does not try again.
_REFUSAL = bytes(32)


@dataclass(frozen=True, slots=True)
class Bulk:
    """Settings of a process for its exchange of bulk with other hosts. ``host``: the address to listen on. ``port`` 0
    takes any free one. ``advertise``: the host name that readers use, if ``host`` is ``0.0.0.0`` or ``::``. The nodes
    of a run have equal ``keys`` and ``encrypted``.

    Raises InvalidKeys if ``keys`` are those of a client from outside, ValueError if readers could not connect.
    """

    host: str
    keys: Keys
    encrypted: bool = True
    port: int = 0
    advertise: str | None = None

    def __post_init__(self) -> None:
        secret_of(self.keys, "check")
        check_advertised(self.host, self.advertise)

    @classmethod
    def of(cls, system: "ActorSystem", *, encrypted: bool) -> "Bulk | None":
        """At the address of a system, with its keys; None if the system is not reached over TCP, or has no keys."""
        if system.tcp is None or system.keys is None:
            return None
        host = "0.0.0.0" if system.tcp.host == "*" else system.tcp.host
        return cls(host, system.keys, encrypted, advertise=system.tcp.advertise)


def secret_of(keys: Keys, purpose: str) -> bytes:
    """32 bytes that the nodes of a run share. Raises InvalidKeys if ``keys`` are those of a client from outside."""
    if keys.server_secret is None:
        raise InvalidKeys(
            "these are a client's keys: bulk is for the nodes of a run, which have server_secret too"
        )
    shared = z85.decode(keys.server_secret) + z85.decode(keys.client_secret)
    return hmac.digest(shared, f"flexmarl bulk 1: {purpose}".encode(), "sha256")


class Refused(Exception):
    """The peer has not proved that it belongs to the run."""


class _Connected(ssl.SSLSocket):
    """A socket that ``ssl`` takes as connected. If its peer has gone meanwhile, the handshake fails.

    ``ssl`` asks for the peer's name to learn if the socket is connected. If it is not, ``ssl`` can leave it open.
    """

    def getpeername(self) -> Any:
        try:
            return super().getpeername()
        except OSError:
            return None


def secure(raw: socket.socket, bulk: Bulk, *, server: bool) -> socket.socket:
    """The connection to use instead of ``raw``, whose peer has proved that it belongs to the run.

    Raises Refused, and OSError (TimeoutError after the socket's timeout); ``raw`` may be closed then.
    """
    if not bulk.encrypted:
        _prove(raw, bulk.keys, server=server)
        return raw
    # An end without TLS's farewell is an error, so that a cut never looks like an end.
    connection = _context(bulk.keys, server).wrap_socket(
        raw, server_side=server, suppress_ragged_eofs=False, do_handshake_on_connect=False
    )
    try:
        connection.do_handshake()
        return connection
    except ssl.SSLEOFError:
        connection.close()
        raise ConnectionResetError("the connection ended in the handshake") from None
    except ssl.SSLError as error:
        connection.close()
        raise Refused(f"TLS: {error.reason or error}") from None
    except OSError:
        connection.close()
        raise


def refusal(error: OSError) -> Refused | None:
    """The peer's refusal, which TLS 1.3 reports with the first bytes that are received; None for other errors."""
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        return Refused(f"TLS: {error.reason}")
    return None


@functools.lru_cache(maxsize=8)
def _context(keys: Keys, server: bool) -> ssl.SSLContext:
    # A certificate looks like a detour for a secret that both sides have. But Python's ssl has pre-shared keys from
    # 3.13 on only. An authority, or a file for each node, would be one thing more to bring to every host.
    seed = secret_of(keys, "certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = _Connected
    context.check_hostname = False  # the certificate is the run's: there is one
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate(seed))
    descriptor = os.memfd_create("certificate")  # OpenSSL reads a file; this one is never on a disk
    try:
        os.write(descriptor, _pem(seed))
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context


def certificate(seed: bytes) -> bytes:
    """The certificate of a run, in DER, of the key ``seed`` (32 bytes, a secret of its nodes); valid for ever.

    Every node computes the same one, and admits no other: an Ed25519 key (RFC 8032) in a self-signed certificate
    (RFC 5280). Python's ``ssl`` needs a certificate for TLS 1.3, and makes none. The key is used for nothing else.
    """
    from cryptography.hazmat.primitives import serialization

    return _certificate(seed).public_bytes(serialization.Encoding.DER)


def _pem(seed: bytes) -> bytes:
    """The certificate and its secret key, as ``SSLContext.load_cert_chain`` reads them."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    secret = Ed25519PrivateKey.from_private_bytes(seed).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return _certificate(seed).public_bytes(serialization.Encoding.PEM) + secret


def _certificate(seed: bytes) -> "x509.Certificate":
    """Equal for equal seeds: nothing in it is random, nor is the signature."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "flexmarl")])
    key = Ed25519PrivateKey.from_private_bytes(seed)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, None)
    )


def _prove(connection: socket.socket, keys: Keys, *, server: bool) -> None:
    secret = secret_of(keys, "plain")
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(mine)
    theirs = exactly(connection, _NONCE_BYTES)
    if hmac.compare_digest(mine, theirs):
        raise Refused("it repeats what it gets")
    names = (b"server", b"client") if server else (b"client", b"server")
    if not server:
        connection.sendall(hmac.digest(secret, names[0] + mine + theirs, "sha256"))
    # The server's proof comes last: a stranger that connects gets nothing to try keys against.
    expected = hmac.digest(secret, names[1] + theirs + mine, "sha256")
    if not hmac.compare_digest(exactly(connection, len(expected)), expected):
        if server:
            connection.sendall(_REFUSAL)
        raise Refused("it does not have the keys of this run")
    if server:
        connection.sendall(hmac.digest(secret, names[0] + mine + theirs, "sha256"))


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fills ``target``. Raises OSError."""
    got, size = 0, len(target)
    while got < size:
        count = connection.recv_into(target[got:])
        if not count:
            raise ConnectionResetError(f"the peer has ended the connection after {got} of {size} bytes")
        got += count


def exactly(connection: socket.socket, size_bytes: int) -> bytearray:
    """``size_bytes`` must have been checked."""
    received = bytearray(size_bytes)
    receive_into(connection, memoryview(received))
    return received
