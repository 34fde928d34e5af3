"""Marks among the answers to a peer."""

from flexmarl.core.delivery.unread import Unread


def full(unread: Unread) -> bool:
    return unread.is_full


def test_a_window_of_answers_that_no_mark_confirms_is_full() -> None:
    unread = Unread(1000)
    assert not unread.sent(200) and unread.sent(100), "a quarter of the window"
    assert unread.mark(1.0) == 1
    assert unread.sent(700) and full(unread)
    assert unread.mark(2.0) == 2
    assert unread.confirmed(1) == 1.0 and not full(unread)
    assert unread.confirmed(1) is None, "it came back twice"
    assert unread.confirmed(2) == 2.0


def test_a_mark_that_is_sent_again_stands_for_the_lost_one_and_takes_no_memory() -> None:
    unread = Unread(1000)
    unread.sent(1000)
    for turn in range(1, 1001):
        assert unread.mark(float(turn)) == turn
    assert len(unread._marks) == 1 and full(unread)
    assert unread.confirmed(999) is None and full(unread)
    assert unread.confirmed(1000) == 1000.0 and not full(unread)
