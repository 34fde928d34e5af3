"""Exact changes between two versions of a chunk."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.transport.remote import deltas


def changed(size: int, seed: int, words: list[int]) -> tuple[bytearray, bytearray]:
    """Random bytes, and the same ones with other values at ``words``."""
    old = np.random.default_rng(seed).integers(0, 2**16, size // 2, dtype=np.uint16)
    new = old.copy()
    for word in words:
        new[word % len(new)] ^= word % 65_535 + 1
    return bytearray(old), bytearray(new)


def round_trip(old: bytearray, new: bytearray) -> bytes:
    changes = deltas.encode(memoryview(old), memoryview(new))
    assert changes is not None
    assert deltas.apply(memoryview(changes + b"next"), memoryview(old)) == len(changes)
    assert old == new
    return changes


@given(st.integers(1, 40_000), st.integers(0, 2**32), st.lists(st.integers(0, 2**32), max_size=40))
def test_every_bit_arrives(quads: int, seed: int, words: list[int]) -> None:
    old, new = changed(8 * quads, seed, words)
    changes = deltas.encode(memoryview(old), memoryview(new))
    if changes is None:
        assert 8 * 4 * len(words) > deltas.MOST_SHARE * len(new) - 8
    else:
        round_trip(old, new)


@pytest.mark.parametrize(
    "words", [[0], [524_287], [65_535], [65_536], [65_537, 131_074], [131_071, 524_287], []]
)
def test_long_gaps_are_filled(words: list[int]) -> None:
    changes = round_trip(*changed(1 << 20, 0, words))
    assert len(changes) <= 4 + 4 * (len(words) + 8)


def test_one_percent_takes_two_percent() -> None:
    words = np.random.default_rng(1).choice(1 << 19, (1 << 19) // 100, replace=False)
    assert len(round_trip(*changed(1 << 20, 0, words.tolist()))) < 0.021 * (1 << 20)


def test_many_changes_are_not_worth_it() -> None:
    old, new = changed(1 << 20, 0, list(range(0, 1 << 19, 8)))
    assert deltas.encode(memoryview(old), memoryview(new)) is None


@given(st.binary(max_size=200), st.integers(1, 50))
def test_any_bytes_are_changes_within_the_chunk_or_refused(changes: bytes, quads: int) -> None:
    memory = bytearray(8 * quads + 64)
    chunk = memoryview(memory)[: 8 * quads]
    try:
        assert deltas.apply(memoryview(changes), chunk) <= len(changes)
    except deltas.BadDelta:
        assert not any(memory)
    assert not any(memory[8 * quads :])
