"""Strangers get no byte of a state."""

import asyncio
import contextlib
import gc
import socket
import ssl
import struct
from dataclasses import replace

import pytest
import torch
from cryptography import x509

from flexmarl.core import Keys
from flexmarl.core.errors import InvalidKeys
from flexmarl.transport.errors import NoPath, PeerRefused, TransferTimeout
from flexmarl.transport.remote.bulk import Bulk, certificate, secret_of, secure
from flexmarl.transport.state import StateTransport

from ...patience import PATIENCE_S
from .hosts import KEYS, Hosts, network, source_of, weights

# ----------------------------------------------------------------------- strangers


async def test_a_stranger_gets_nothing(hosts: Hosts, owner: StateTransport, bulk: Bulk) -> None:
    handle = await owner.set("weights", weights(), version=1)
    stranger_bulk = replace(bulk, keys=Keys.make())
    async with hosts.open("far", stranger_bulk) as stranger:
        into = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
        with pytest.raises(PeerRefused) as raised:
            await stranger.get(handle, into=into)
        assert not into["w"].any()
    error = raised.value
    assert (error.key, error.version, error.peer) == ("weights", 1, source_of(handle).address)
    assert (error.missing_range, error.got_bytes, error.size_bytes) == (0, 0, handle.size_bytes)
    assert network(owner).sent_bytes == 0
    async with asyncio.timeout(PATIENCE_S):
        while not network(owner).refused:  # the owner may see the end of the connection later
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("sends", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, b"FXB1" * 500])
async def test_bytes_of_a_stranger_get_nothing(owner: StateTransport, bulk: Bulk, sends: bytes) -> None:
    handle = await owner.set("weights", weights(), version=1)
    host, port = source_of(handle).address.split(":")
    stranger, writer = await asyncio.open_connection(host, int(port))
    received = b""
    with contextlib.suppress(OSError):  # it has ended the connection already
        writer.write(sends)
        writer.write_eof()
        received = await stranger.read()
    writer.close()
    assert len(received) <= 64  # a random number, or an alert of TLS
    assert network(owner).sent_bytes == 0


async def test_tls_without_the_certificate_of_the_run_gets_nothing(hosts: Hosts) -> None:
    async with hosts.open("near", Bulk("127.0.0.1", KEYS)) as owner:
        handle = await owner.set("weights", weights(), version=1)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        host, port = source_of(handle).address.split(":")

        def attempt() -> bytes:
            with (
                socket.create_connection((host, int(port)), PATIENCE_S) as raw,
                context.wrap_socket(raw) as tls,
            ):
                tls.sendall(b"FXB1")
                return tls.recv(100)

        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(attempt)
        assert network(owner).sent_bytes == 0


async def test_plain_and_encrypted_ends_refuse_each_other(
    hosts: Hosts, owner: StateTransport, bulk: Bulk
) -> None:
    handle = await owner.set("weights", weights(), version=1)
    async with hosts.open("far", replace(bulk, encrypted=not bulk.encrypted)) as other:
        with pytest.raises(NoPath, match="path 'tcp': it is (encrypted|plain), and this process reads"):
            await other.get(handle)
        lying = replace(handle, sources=(replace(source_of(handle), encrypted=not bulk.encrypted),))
        with pytest.raises((PeerRefused, TransferTimeout)):
            await other.get(lying, timeout_s=2)
    assert network(owner).sent_bytes == 0


async def test_a_reader_without_keys_has_no_path(hosts: Hosts, owner: StateTransport) -> None:
    handle = await owner.set("weights", weights(), version=1)
    async with hosts.open("far", None) as other:
        with pytest.raises(NoPath, match="exchanges no states with other hosts"):
            await other.get(handle)


def test_a_client_from_outside_exchanges_no_states() -> None:
    with pytest.raises(InvalidKeys):
        Bulk("127.0.0.1", Keys.for_client(KEYS.server_public))
    with pytest.raises(ValueError, match="advertise"):
        Bulk("0.0.0.0", KEYS)


async def test_a_connection_that_ended_before_the_handshake_leaves_no_socket_open(bulk: Bulk) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reader = socket.create_connection(listener.getsockname())
        connection, _ = listener.accept()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reader.close()  # with a reset: the connection has no peer any more
    with connection, pytest.raises(OSError):
        await asyncio.to_thread(secure, connection, bulk, server=True)
    gc.collect()  # an open socket would be reported


# ----------------------------------------------------------------------- certificate

# RFC 8032, section 7.1: secret key, public key
VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
    ),
]


@pytest.mark.parametrize(("seed", "public"), VECTORS)
def test_the_public_key_of_a_certificate_is_that_of_the_standard(seed: str, public: str) -> None:
    made = x509.load_der_x509_certificate(certificate(bytes.fromhex(seed)))
    assert made.public_key().public_bytes_raw().hex() == public  # type: ignore[union-attr]  # an Ed25519 key
    made.verify_directly_issued_by(made)  # raises InvalidSignature


def test_all_nodes_of_a_run_compute_the_same_certificate_and_others_another() -> None:
    keys = Keys.make()
    seed = secret_of(keys, "certificate")
    assert certificate(seed) == certificate(secret_of(keys, "certificate"))
    assert seed not in certificate(seed)
    others = {secret_of(keys, "plain"), secret_of(Keys.make(), "certificate"), seed}
    assert len(others) == 3


def test_a_client_from_outside_has_no_certificate() -> None:
    with pytest.raises(InvalidKeys, match="server_secret"):
        secret_of(Keys.for_client(Keys.make().server_public), "certificate")
