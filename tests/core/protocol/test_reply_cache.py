"""The reply cache in memory: its bounds, and the order of eviction. The journal's model tests its content."""

import time

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core.protocol.reply_cache import Key, ReplyCache


@given(
    limit_bytes=st.integers(3000, 6000),
    steps=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1200), st.integers(0, 6)), max_size=60),
)
def test_over_the_limit_the_oldest_replies_go(limit_bytes: int, steps: list[tuple[str, int, int]]) -> None:
    remembered = ReplyCache(limit_bytes)
    alive: list[tuple[Key, bytes]] = []
    evicted = 0
    for seq, (sender, size, back) in enumerate(steps):
        remembered.settle(sender, 1, seq - back)
        alive = [(key, reply) for key, reply in alive if key[0] != sender or key[2] >= seq - back]
        assert remembered.put((sender, 1, seq), bytes(size))
        alive.append(((sender, 1, seq), bytes(size)))
        evicted += len(alive) - len(remembered)
        alive = alive[len(alive) - len(remembered) :]
        assert list(remembered.items()) == alive
        assert remembered.size_bytes <= limit_bytes
    assert remembered.statistics().evicted == evicted


def test_no_more_is_forgotten_than_must_be() -> None:
    remembered = ReplyCache(100_000)
    for seq in range(1000):
        remembered.put(("a", 1, seq), bytes(600))
    assert 100_000 - 1001 < remembered.size_bytes <= 100_000
    assert len(remembered) + remembered.statistics().evicted == 1000


def test_senders_without_replies_are_bounded_too() -> None:
    remembered = ReplyCache(100_000)
    remembered.put(("kept", 1, 0), b"kept")
    for number in range(10_000):
        remembered.settle(f"passing-{number}", 1, 5)
        remembered.put((f"once-{number}", 1, 7), b"")
        remembered.settle(f"once-{number}", 1, 8)
    assert remembered.size_bytes <= 100_000
    assert remembered.statistics().senders < 200
    assert remembered.statistics().evicted == 0
    assert remembered.get(("kept", 1, 0)) == b"kept"
    assert remembered.is_settled(("passing-9999", 1, 4)), "the oldest go, not the newest"
    assert not remembered.is_settled(("passing-0", 1, 4))


def test_size_returns_to_nothing() -> None:
    remembered = ReplyCache()
    for seq in range(50):
        remembered.put(("a", 1, seq), b"reply")
    remembered.forget_sender("a", 2)
    only_the_sender = ReplyCache()
    only_the_sender.forget_sender("a", 2)
    assert (len(remembered), remembered.size_bytes) == (0, only_the_sender.size_bytes)


def test_settling_does_not_look_through_what_stays() -> None:
    remembered = ReplyCache(2**30)
    for seq in range(100_000):
        remembered.put(("a", 1, seq), b"")
    began = time.process_time()
    for floor in range(2000):  # a scan of all each time would take about 5 s
        remembered.settle("a", 1, floor)
    assert time.process_time() - began < 0.5
    assert len(remembered) == 100_000 - 1999
