"""Credit: never above the window, never lost, in turn."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flexmarl.core.protocol.credit import Credit

from .sessions import Turn

MAX_REQUESTS, MAX_BYTES = 3, 100


class Window(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.credit = Credit(MAX_REQUESTS, MAX_BYTES)
        self.held: list[int] = []  # the bytes of each request that was sent
        self.queue: list[Turn] = []

    def room(self) -> bool:
        return len(self.held) < MAX_REQUESTS and sum(self.held) < MAX_BYTES

    @rule(size_bytes=st.sampled_from([1, 40, 99, 100, 1000]))
    def take(self, size_bytes: int) -> None:
        expected = self.room() and not self.queue
        assert self.credit.take(size_bytes) is expected
        if expected:
            self.held.append(size_bytes)
        else:
            self.queue.append(turn := Turn(size_bytes))
            self.credit.waiting.append(turn)

    @rule(indexes=st.lists(st.integers(0, 5), min_size=1, max_size=3))
    def give(self, indexes: list[int]) -> None:
        given = [self.held.pop(index % len(self.held)) for index in indexes[: len(self.held)]]
        expected = []
        while self.queue and self.room():
            turn = self.queue.pop(0)
            if not turn.gave_up:
                expected.append(turn)
                self.held.append(turn.size_bytes)
        assert list(self.credit.give_back(len(given), sum(given))) == expected

    @rule(index=st.integers(0, 5))
    def give_up_unnoticed(self, index: int) -> None:
        if self.queue:
            self.queue[index % len(self.queue)].gave_up = True

    @invariant()
    def agrees(self) -> None:
        assert (self.credit.requests, self.credit.size_bytes) == (len(self.held), sum(self.held))
        assert 0 <= self.credit.requests <= MAX_REQUESTS
        assert list(self.credit.waiting) == self.queue
        assert self.held or not self.queue, "waits for credit that no request holds"


TestWindow = Window.TestCase


def test_a_message_larger_than_the_window_passes_alone() -> None:
    credit = Credit(MAX_REQUESTS, MAX_BYTES)
    assert credit.take(10 * MAX_BYTES)
    assert not credit.take(1)
    credit.waiting.append(turn := Turn(1))
    assert credit.give_back(0, 0) == []
    assert credit.give_back(1, 10 * MAX_BYTES) == [turn] and credit.size_bytes == 1


def test_credit_is_not_granted_to_who_has_given_up_in_that_moment() -> None:
    credit = Credit(1, MAX_BYTES)
    assert credit.take(3)
    gone, patient = Turn(5), Turn(7)
    credit.waiting += (gone, patient)
    gone.gave_up = True
    assert credit.give_back(1, 3) == [patient]
    assert (credit.requests, credit.size_bytes) == (1, 7)
