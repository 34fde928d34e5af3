"""Two sessions on a link with every fault that links have, against a model."""

import random
import sys

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from flexmarl.core.protocol.envelopes import Kind
from flexmarl.core.protocol.session import LinkState

from .sessions import SMALL
from .two_sessions import ACTORS, Node, Wanted, World, happened

steps = 0


class Conversation(RuleBasedStateMachine):
    """Each rule is a step, and draws little: most of the time goes into the sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.storms = 0

    def node(self, number: int) -> Node:
        return self.world.nodes["xy"[number & 1]]

    @rule(seed=st.integers(0, 2**32 - 1))
    def storm(self, seed: int) -> None:
        """Many steps drawn at once: hypothesis draws, shrinks and repeats the seed."""
        self.storms += 1
        rng = random.Random(f"{seed} {self.storms}")
        for _ in range(60):
            self.step(rng)

    def step(self, rng: random.Random) -> None:
        global steps
        steps += 1
        world, node = self.world, self.node(rng.getrandbits(1))
        match rng.randrange(24):
            case 0 | 1 | 2 | 3 | 4 | 5:
                kind = rng.choice((Kind.CALL, Kind.TELL, Kind.STREAM))
                node.ask(
                    kind, rng.choice(ACTORS), rng.choice((0.1, 0.7, 3.0, 60.0)), rng.choice((10, 90, 500))
                )
            case 6 | 7 | 8 | 9 | 10 | 11 | 12:
                world.arrive(node.name, 0)
            case 13:
                world.arrive(node.name, rng.randrange(8))  # reordered
            case 14:
                world.arrive(node.name, rng.randrange(8), keep=True)  # duplicated
            case 15:
                if world.link[node.name]:
                    world.link[node.name].popleft()  # lost
            case 16 | 17 | 18 | 19:
                if node.serving:
                    node.answer(rng.choice(list(node.serving)), error=rng.random() < 0.2)
            case 20:
                if node.session.requests._open:
                    node.give_up(rng.choice(list(node.session.requests._open.values())))
            case 21:
                world.pass_time(rng.choice((0.01, 0.3, 1.0, 4.0)))
            case 22:
                world.mend() if not world.up else (world.cut() if rng.random() < 0.4 else None)
            case 23:
                if rng.random() < 0.15:
                    world.restart(node.name)
                elif (waiting := node.session.requests.credit(ACTORS[0]).waiting) and rng.random() < 0.5:
                    assert isinstance(waiting[0], Wanted)
                    waiting[0].caller.gave_up = True  # and its task has not run yet
        self.check()

    def check(self) -> None:
        for node in self.world.nodes.values():
            session = node.session
            opened = list(session.requests._open.values())
            for actor, credit in session.requests._credit.items():
                mine = [request.size_bytes for request in opened if request.actor == actor]
                mine += [size for holder, size in session.requests._tells.values() if holder is credit]
                assert credit.requests == len(mine) <= SMALL.window_requests
                assert credit.size_bytes == sum(mine)
                assert not credit.waiting or mine, "waits for credit that no request holds"
            if session.requests:
                assert session.wake_at() is not None, "a request that nothing watches"
            if session.state is not LinkState.UP and opened:
                assert session._connect_by is not None, "waits for ever for a connection"

    @rule(actions=st.lists(st.sampled_from(("cut", "mend", "restart x", "restart y", "settle")), max_size=3))
    def upheaval(self, actions: list[str]) -> None:
        for action in actions:
            if action.startswith("restart"):
                self.world.restart(action[-1])
            else:
                getattr(self.world, action)()

    @invariant()
    def agrees(self) -> None:
        self.check()

    def teardown(self) -> None:
        self.world.settle()
        for node in self.world.nodes.values():
            session = node.session
            for what in (
                "requests",
                "expired",
                "late_replies",
                "lost",
                "duplicates",
                "out_of_order",
            ):
                happened[what] += getattr(session.statistics(), what)
            assert not session.requests and session.wake_at() is None
            assert all(
                c.requests == c.size_bytes == 0 and not c.waiting for c in session.requests._credit.values()
            )
        for caller, kind in self.world.callers:
            assert kind is Kind.TELL or caller.done(), f"{caller.name} waits for ever"


def test_two_sessions_keep_their_promises_whatever_the_link_does() -> None:
    global steps
    steps = 0
    happened.clear()
    # Steps are cheap and there are many: no database of examples, no limit on how long one may take.
    run_state_machine_as_test(
        Conversation,
        settings=settings(
            max_examples=400,
            stateful_step_count=15,
            suppress_health_check=list(HealthCheck),
        ),
    )
    sys.stdout.write(f"{steps} steps: {dict(happened)}\n")
    assert steps >= 100_000
    rare = ("expired", "late_replies", "lost", "duplicates", "out_of_order", "waited", "restarts")
    assert all(happened[what] >= 20 for what in rare), happened
