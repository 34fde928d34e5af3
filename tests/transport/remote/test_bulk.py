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

from flexmarl.core import Keys
from flexmarl.core.errors import InvalidKeys
from flexmarl.transport.errors import NoPath, PeerRefused, TransferTimeout
from flexmarl.transport.remote.bulk import Bulk, secure
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
