"""Incarnations: successors are recognized without a clock, lineages are independent, and memory is bounded."""

from flexmarl.core.protocol.incarnations import Incarnations, lineage_of, new_epoch
from flexmarl.core.protocol.session import Session


def test_a_restart_is_a_later_incarnation_of_its_lineage() -> None:
    epoch = new_epoch()
    assert 0 < epoch < 2**63
    assert lineage_of(epoch + 1) == lineage_of(epoch)
    known = Incarnations(10)
    assert not known.heard(epoch) and not known.is_over(epoch)
    assert known.heard(epoch + 1)
    assert known.is_over(epoch) and not known.is_over(epoch + 1) and not known.is_over(epoch + 2)
    assert not known.heard(epoch), "what is over stays over"
    assert known.is_over(epoch)


def test_lineages_are_independent_and_the_oldest_are_forgotten() -> None:
    known = Incarnations(10)
    epochs = [number << 24 | 5 for number in range(20)]
    for epoch in epochs:
        assert not known.heard(epoch)
    assert len(known) == 10
    assert not any(known.is_over(epoch) for epoch in epochs)
    assert known.is_over(epochs[-1] - 1) and not known.is_over(epochs[0] - 1)
    known.end(epochs[-1])
    assert known.is_over(epochs[-1] + 1000) and not known.is_over(epochs[-2])


def test_another_process_at_an_address_ends_the_one_before() -> None:
    session: Session[None] = Session(up=True)  # type: ignore[type-var]  # it has no requests
    high, low = 9 << 24 | 1, 3 << 24 | 1
    assert session.heard(high) is None
    effects = session.heard(low)
    assert effects is not None and effects.reason == "its process was restarted"
    assert session.is_over(high) and session.is_over(high + 1) and not session.is_over(low)
