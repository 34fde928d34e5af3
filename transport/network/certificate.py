"""The certificate of a run, computed from its keys: every node has the same one, and admits no other.

It is an Ed25519 key (RFC 8032) in a self-signed certificate (RFC 5280). Python's ``ssl`` needs a certificate for TLS
1.3, and makes none. The key is used for nothing else, and computed once per process: that takes milliseconds.
"""

import base64
import hashlib
import hmac
from typing import Final

from zmq.utils import z85

from ...core.errors import InvalidKeys
from ...core.wire.curve import Keys

# --------------------------------------------------------------------------- keys


def secret_of(keys: Keys, purpose: str) -> bytes:
    """32 bytes that the nodes of a run share. Raises InvalidKeys if ``keys`` are those of a client from outside."""
    if keys.server_secret is None:
        raise InvalidKeys(
            "these are a client's keys: bulk is for the nodes of a run, which have server_secret too"
        )
    shared = z85.decode(keys.server_secret) + z85.decode(keys.client_secret)
    return hmac.digest(shared, f"flexmarl bulk 1: {purpose}".encode(), "sha256")


# --------------------------------------------------------------------------- Ed25519, RFC 8032 section 5.1

_P: Final = 2**255 - 19
_ORDER: Final = 2**252 + 27742317777372353535851937790883648493
_D: Final = -121665 * pow(121666, -1, _P) % _P
_Point = tuple[int, int, int, int]


def _base_point() -> _Point:
    y = 4 * pow(5, -1, _P) % _P
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * pow(2, (_P - 1) // 4, _P) % _P
    x = _P - x if x % 2 else x
    return x, y, 1, x * y % _P


def _add(p: _Point, q: _Point) -> _Point:
    a, b = (p[1] - p[0]) * (q[1] - q[0]) % _P, (p[1] + p[0]) * (q[1] + q[0]) % _P
    c, d = 2 * p[3] * q[3] * _D % _P, 2 * p[2] * q[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _times_base(number: int) -> bytes:
    """The base point, ``number`` times, compressed."""
    result, power = (0, 1, 1, 0), _base_point()
    while number:
        if number % 2:
            result = _add(result, power)
        power = _add(power, power)
        number //= 2
    inverse = pow(result[2], -1, _P)
    x, y = result[0] * inverse % _P, result[1] * inverse % _P
    return (y | (x % 2) << 255).to_bytes(32, "little")


def _expanded(seed: bytes) -> tuple[int, bytes]:
    digest = hashlib.sha512(seed).digest()
    scalar = int.from_bytes(digest[:32], "little") & ((1 << 254) - 8) | 1 << 254
    return scalar, digest[32:]


def public_key(seed: bytes) -> bytes:
    return _times_base(_expanded(seed)[0])


def sign(seed: bytes, message: bytes) -> bytes:
    scalar, prefix = _expanded(seed)

    def number(*parts: bytes) -> int:
        return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little") % _ORDER

    nonce = number(prefix, message)
    commitment = _times_base(nonce)
    answer = (nonce + number(commitment, _times_base(scalar), message) * scalar) % _ORDER
    return commitment + answer.to_bytes(32, "little")


# --------------------------------------------------------------------------- X.509, RFC 5280 and 8410

_ED25519: Final = bytes.fromhex("300506032b6570")
_CA: Final = bytes.fromhex("300f0603551d130101ff040530030101ff")  # basicConstraints, critical: CA


def _der(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    size = len(content)
    length = bytes([size]) if size < 128 else bytes([0x82, size >> 8, size & 255])
    return bytes([tag]) + length + content


def certificate(seed: bytes) -> bytes:
    """The certificate, in DER; valid for ever."""
    name = _der(0x30, _der(0x31, _der(0x30, bytes.fromhex("0603550403"), _der(0x0C, b"flexmarl"))))
    valid = _der(0x30, _der(0x17, b"700101000000Z"), _der(0x18, b"99991231235959Z"))
    key = _der(0x30, _ED25519, _der(0x03, b"\0", public_key(seed)))
    version, serial = _der(0xA0, _der(0x02, b"\2")), _der(0x02, b"\1")
    extensions = _der(0xA3, _der(0x30, _CA))
    to_sign = _der(0x30, version, serial, _ED25519, name, valid, name, key, extensions)
    return _der(0x30, to_sign, _ED25519, _der(0x03, b"\0", sign(seed, to_sign)))


def pem(seed: bytes) -> bytes:
    """The certificate and its secret key, as ``SSLContext.load_cert_chain`` reads them."""
    secret = _der(0x30, _der(0x02, b"\0"), _ED25519, _der(0x04, _der(0x04, seed)))
    return _armoured("CERTIFICATE", certificate(seed)) + _armoured("PRIVATE KEY", secret)


def _armoured(label: str, content: bytes) -> bytes:
    return (
        f"-----BEGIN {label}-----\n".encode()
        + base64.encodebytes(content)
        + f"-----END {label}-----\n".encode()
    )
