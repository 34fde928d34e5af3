"""The certificate of a run, computed from a secret of its nodes: every node has the same one, and admits no other.

It is an Ed25519 key (RFC 8032) in a self-signed certificate (RFC 5280). Python's ``ssl`` needs a certificate for TLS
1.3, and makes none. The key is used for nothing else.
"""

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "flexmarl")])


def certificate(seed: bytes) -> bytes:
    """The certificate of the key ``seed`` (32 bytes), in DER; valid for ever."""
    return _certificate(seed).public_bytes(serialization.Encoding.DER)


def pem(seed: bytes) -> bytes:
    """The certificate and its secret key, as ``SSLContext.load_cert_chain`` reads them."""
    secret = Ed25519PrivateKey.from_private_bytes(seed).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return _certificate(seed).public_bytes(serialization.Encoding.PEM) + secret


def _certificate(seed: bytes) -> x509.Certificate:
    """Equal for equal seeds: nothing in it is random, nor is the signature."""
    key = Ed25519PrivateKey.from_private_bytes(seed)
    return (
        x509.CertificateBuilder()
        .subject_name(_NAME)
        .issuer_name(_NAME)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, None)
    )
