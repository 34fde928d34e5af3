"""The format of the store's journal, written and read as its description says."""

import struct

import xxhash

HEAD = b"flexmarl samples\x04\x00\x00\x00"


def framed(body: bytes) -> bytes:
    return struct.pack("<IQ", len(body), xxhash.xxh3_64_intdigest(body)) + body


def read_naively(content: bytes) -> list[bytes]:
    """The bodies of the whole records, by the format's description."""
    bodies, rest = [], content[len(HEAD) :]
    while len(rest) >= 12:
        length, digest = struct.unpack("<IQ", rest[:12])
        body, rest = rest[12 : 12 + length], rest[12 + length :]
        if len(body) < length or xxhash.xxh3_64_intdigest(body) != digest:
            break
        bodies.append(body)
    return bodies


def ignore(body: bytes) -> None:
    pass
