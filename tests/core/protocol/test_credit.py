"""Credit: never above the window, never lost, in turn."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flexmarl.core.protocol.credit import Credit

MAX_REQUESTS, MAX_BYTES = 3, 100


class Turn:
    def __init__(self) -> None:
        self.gave_up = False

    def done(self) -> bool:
        return self.gave_up


class Window(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.credit: Credit[Turn] = Credit(MAX_REQUESTS, MAX_BYTES)
        self.held: list[int] = []  # the bytes of each request that was sent
        self.granted = 0  # holds credit and has not sent yet
        self.queue: list[Turn] = []

    def room(self) -> bool:
        return len(self.held) + self.granted < MAX_REQUESTS and sum(self.held) < MAX_BYTES

    def expect(self, turns: list[Turn]) -> None:
        expected = []
        while self.queue and self.room() and not self.granted:
            turn = self.queue.pop(0)
            if not turn.gave_up:
                expected.append(turn)
                self.granted = 1
        assert turns == expected

    @rule(size_bytes=st.sampled_from([0, 1, 40, 99, 100, 1000]))
    def take(self, size_bytes: int) -> None:
        expected = self.room() and not self.queue and not self.granted
        assert self.credit.take() is expected
        if expected and size_bytes == 0:  # could not be packed
            self.expect(self.credit.forgo())
        elif expected:
            self.credit.use(size_bytes)
            self.held.append(size_bytes)
        else:
            self.queue.append(turn := Turn())
            self.credit.waiting.append(turn)

    @rule(index=st.integers(0, 5))
    def give(self, index: int) -> None:
        if self.held:
            self.expect(self.credit.give(self.held.pop(index % len(self.held))))

    @rule(size_bytes=st.sampled_from([1, 40, 99, 1000]))
    def send(self, size_bytes: int) -> None:
        if self.granted:
            self.credit.use(size_bytes)
            self.granted = 0
            self.held.append(size_bytes)
            self.expect(self.credit.grant())

    @rule()
    def forgo(self) -> None:
        if self.granted:
            self.granted = 0
            self.expect(self.credit.forgo())

    @rule(index=st.integers(0, 5))
    def give_up_unnoticed(self, index: int) -> None:
        if self.queue:
            self.queue[index % len(self.queue)].gave_up = True

    @invariant()
    def agrees(self) -> None:
        assert (self.credit.requests, self.credit.size_bytes) == (
            len(self.held) + self.granted,
            sum(self.held),
        )
        assert 0 <= self.credit.requests <= MAX_REQUESTS
        assert list(self.credit.waiting) == self.queue
        assert self.held or self.granted or not self.queue, "waits for credit that no request holds"


TestWindow = Window.TestCase


def test_a_message_larger_than_the_window_passes_alone() -> None:
    credit: Credit[Turn] = Credit(MAX_REQUESTS, MAX_BYTES)
    assert credit.take()
    credit.use(10 * MAX_BYTES)
    assert not credit.take()
    assert credit.give(10 * MAX_BYTES) == []
    assert credit.take()


def test_credit_is_not_granted_to_who_has_given_up_in_that_moment() -> None:
    credit: Credit[Turn] = Credit(1, MAX_BYTES)
    assert credit.take()
    gone, patient = Turn(), Turn()
    credit.waiting += (gone, patient)
    gone.gave_up = True
    assert credit.forgo() == [patient]
    assert credit.requests == 1
    assert credit.forgo() == [] and credit.requests == 0
