"""The calls in flight: a model against random opening, closing, cancelling and time."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flexmarl.core.session import Session


class Calls(RuleBasedStateMachine):
    """Every call ends exactly once: by its reply, its caller, its deadline or its peer's death."""

    def __init__(self) -> None:
        super().__init__()
        self.session: Session[int] = Session()
        self.now = 0.0
        self.open: dict[int, tuple[str, float]] = {}
        self.opened = self.expired = self.late = 0

    @rule(address=st.sampled_from("xy"), timeout_s=st.floats(0.001, 10))
    def call(self, address: str, timeout_s: float) -> None:
        self.opened += 1
        call_id = self.session.open(self.now, address, "actor", "endpoint", timeout_s, self.opened)
        assert call_id not in self.open
        self.open[call_id] = (address, self.now + timeout_s)

    @rule(data=st.data(), unknown=st.booleans())
    def reply(self, data: st.DataObject, unknown: bool) -> None:
        if unknown or not self.open:
            self.late += 1
            assert self.session.close(10**9) is None
            return
        call_id = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[call_id]
        closed = self.session.close(call_id)
        assert closed is not None and closed.call_id == call_id
        assert self.session.cancel(call_id) is None

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        if self.open:
            call_id = data.draw(st.sampled_from(sorted(self.open)))
            del self.open[call_id]
            assert self.session.cancel(call_id) is not None

    @rule(seconds=st.floats(0, 5))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due = {call_id for call_id, (_, deadline) in self.open.items() if deadline <= self.now}
        assert {call.call_id for call in self.session.expire(self.now)} == due
        self.expired += len(due)
        for call_id in due:
            del self.open[call_id]

    @rule(address=st.sampled_from("xy"))
    def peer_dies(self, address: str) -> None:
        held = {call_id for call_id, (peer, _) in self.open.items() if peer == address}
        assert {call.call_id for call in self.session.fail(address)} == held
        for call_id in held:
            del self.open[call_id]

    @invariant()
    def agrees(self) -> None:
        statistics = self.session.statistics()
        assert statistics.in_flight == len(self.open)
        assert (statistics.calls, statistics.expired, statistics.late_replies) == (
            self.opened,
            self.expired,
            self.late,
        )
        assert self.session.next_deadline() == min(
            (deadline for _, deadline in self.open.values()), default=None
        )


TestCalls = Calls.TestCase
