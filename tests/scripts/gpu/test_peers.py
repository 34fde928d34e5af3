"""Processes that tests start."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from scripts.gpu.checks import Card
from scripts.gpu.peers import Peer, PeerFailed, Side, pattern


async def add(side: Side, first: int, second: int) -> int:
    return first + second


async def fail(side: Side) -> None:
    raise ValueError("no room")


async def die(side: Side) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def hang(side: Side) -> None:
    await asyncio.Event().wait()


def test_a_peer_answers_and_its_errors_and_its_end_are_errors_here(card: Card) -> None:
    with Peer(card, card.folder) as peer:
        assert peer.call(add, 1, 2) == 3
        with pytest.raises(PeerFailed, match="ValueError: no room"):
            peer.call(fail)
        assert peer.call(add, 3, second=4) == 7
        with pytest.raises(PeerFailed, match="status -9"):
            peer.call(die)
        with pytest.raises(PeerFailed, match="ended"):
            peer.call(add, 1, 2)
    with Peer(card, card.folder) as peer:
        assert peer.call(add, 1, 2) == 3
        peer.begin(hang)
        with pytest.raises(PeerFailed, match="no answer within 0.1 s"):
            peer.answer(0.1)
        peer.kill()


def test_the_patience_with_a_peer_grows_with_the_limits(card: Card) -> None:
    with Peer(replace(card, limit_factor=1 / 4096), card.folder) as peer:
        peer.begin(hang)
        with pytest.raises(PeerFailed, match="no answer within 0.146484 s"):
            peer.answer()


def test_patterns_differ_and_are_of_any_length() -> None:
    first, second = pattern(1, 1001), pattern(2, 1001)
    assert len(first) == 1001 and not first.equal(second) and first.equal(pattern(1, 1001))
    assert len(set(first[:64].tolist())) > 32
