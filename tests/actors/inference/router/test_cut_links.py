"""Links that are cut, under any order of events."""

import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flexmarl.actors.inference.router.cut_links import CutLinks, LinkState

LINKS = st.tuples(st.integers(1, 2), st.integers(1, 2))


class LinksMachine(RuleBasedStateMachine):
    """Turns go where they may, as the router sends them; the books say which links have lost turns since the last one
    that ended well."""

    def __init__(self) -> None:
        super().__init__()
        self.links = CutLinks()
        self.now = 0.0
        self.turns = 0
        self.under_way: dict[int, tuple[int, int]] = {}
        self.losses: dict[tuple[int, int], int] = {}
        self.answers: set[tuple[int, int]] = set()
        """Links of which the instance has answered the router since their first loss."""

    @rule(link=LINKS)
    def route(self, link: tuple[int, int]) -> None:
        if self.links.is_open(*link):
            self.turns += 1
            self.under_way[self.turns] = link
            self.links.routed(*link, self.turns)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(sorted(self.under_way)))
        link = self.under_way.pop(turn)
        at_fault = self.links.lost(*link, turn, self.now)
        assert (at_fault is not None) == (link in self.answers), "else the instance may be dead"
        self.losses[link] = self.losses.get(link, 0) + 1

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), well=st.booleans())
    def end(self, data: st.DataObject, well: bool) -> None:
        turn = data.draw(st.sampled_from(sorted(self.under_way)))
        link = self.under_way.pop(turn)
        self.links.ended(*link, turn, well=well)
        if well:
            self.forget(link)
            assert self.links.is_open(*link)

    @rule(instance=st.integers(1, 2))
    def answer(self, instance: int) -> None:
        self.links.answered(instance)
        self.answers |= {link for link in self.losses if link[1] == instance}

    @rule(seconds=st.sampled_from([0.0, 0.7, 5.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        due_s = self.links.next_try_s
        self.now += seconds
        assert self.links.expire(self.now) == (due_s <= self.now)

    @rule(session=st.integers(1, 2))
    def end_session(self, session: int) -> None:
        self.links.forget(session=session)
        self.under_way = {turn: link for turn, link in self.under_way.items() if link[0] != session}
        for link in [link for link in self.losses if link[0] == session]:
            self.forget(link)

    @rule(instance=st.integers(1, 2))
    def lose_instance(self, instance: int) -> None:
        self.links.forget(instance=instance)
        self.under_way = {turn: link for turn, link in self.under_way.items() if link[1] != instance}
        for link in [link for link in self.losses if link[1] == instance]:
            self.forget(link)

    def forget(self, link: tuple[int, int]) -> None:
        self.losses.pop(link, None)
        self.answers.discard(link)

    @invariant()
    def only_links_with_two_losses_are_at_fault(self) -> None:
        assert {(link.session, link.instance) for link in self.links} == self.losses.keys()
        for link in self.links:
            key = link.session, link.instance
            assert self.links.of(*key) is None or (key in self.answers and self.losses[key] >= 2)
        assert self.links.any_at_fault == any(self.links.of(*link) for link in self.losses)

    @invariant()
    def a_closed_link_opens_again(self) -> None:
        """By time, or by the end of its trial."""
        for link in self.links:
            if not self.links.is_open(link.session, link.instance):
                is_tried = link.state is LinkState.TRIED
                assert link.trial in self.under_way if is_tried else self.now < link.retry_s < math.inf
                assert is_tried or link.retry_s >= self.links.next_try_s


TestLinksMachine = LinksMachine.TestCase
