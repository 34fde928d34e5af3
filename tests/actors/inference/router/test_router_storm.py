"""Any order of the router's events: after each, its decisions and its books keep the rules."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flexmarl.actors.inference.router.instance_states import InstanceState
from flexmarl.actors.inference.router.rebalancer import BalanceConfig, MoveRules
from flexmarl.actors.inference.router.router import Router
from flexmarl.actors.inference.router.router_config import RouterConfig
from flexmarl.actors.inference.router.router_decisions import (
    Changed,
    Decision,
    Installed,
    Load,
    Moved,
    NoInstances,
    Probe,
    Refuse,
    Route,
)
from flexmarl.actors.inference.router.router_loads import RebalanceSettings
from flexmarl.actors.messages import RouteAssigned, RouteRequest
from flexmarl.actors.names import PolicyName, Version

A, B = PolicyName("a"), PolicyName("b")
CONFIG = RouterConfig(load_timeout_s=50.0, return_timeout_s=80.0)
NAMES = ["i0", "i1", "i2", "i3", "i4"]


class RouterMachine(RuleBasedStateMachine):
    """Keeps its own books of turns and instances from the decisions, and holds them against the rules."""

    @initialize(measured=st.sampled_from([True, True, False]))
    def start(self, measured: bool) -> None:
        balance = BalanceConfig(scope="intra+inter", threshold=0.5)
        self.router = Router(
            [A, B], CONFIG, RebalanceSettings(balance, {}, (A,), MoveRules(margin=0.0, settle=0.5))
        )
        self.now = 0.0
        self.policies: dict[str, PolicyName] = {}
        self.capacities: dict[str, int] = {}
        self.numbers: dict[str, int] = {}
        self.published: dict[PolicyName, int] = {}
        self.to_load: dict[int, tuple[PolicyName, int]] = {}
        """Newest load of each instance, by number."""
        self.serves: dict[int, tuple[PolicyName, int]] = {}
        self.draining: dict[int, PolicyName | None] = {}
        self.suspects: dict[int, tuple[PolicyName, int] | None] = {}
        self.turns: dict[tuple[int, int], RouteRequest] = {}
        self.waiting: set[tuple[int, int]] = set()
        self.at: dict[tuple[int, int], int] = {}
        self.publishing: dict[PolicyName, int] = {}
        self.next_turn = 0
        if measured:  # moves need the times of loads and turns
            self.serve_and_measure()

    def serve_and_measure(self) -> None:
        for policy in (A, B):
            for number in range(2):
                self.join(f"{policy}{number}", policy, 1)
            self.publish(policy)
            self.load_all()
            self.ask(1, policy, 0, False, 10, 0.0, "", 1)
        self.now += 4.0
        for turn in sorted(self.turns):
            self.end(turn, 10)
        self.decide()

    def decide(self) -> None:
        waiting, instances = len(self.waiting), len(self.numbers)
        decided = self.router.decisions(self.now)
        kinds = Counter(type(decision) for decision in decided)
        assert kinds[Route] + kinds[Refuse] <= waiting and kinds[Probe] <= instances + 1
        assert max(kinds[Load], kinds[Moved]) <= instances + 1 and kinds[Changed] <= 3 * (instances + 1)
        assert max(kinds[Installed], kinds[NoInstances]) <= len(self.published)
        self.follow(decided)
        assert self.router.decisions(self.now) == [], "decisions make no others"
        assert self.router.due_s > self.now, "the router would be due again and again"

    def follow(self, decided: list[Decision]) -> None:
        for decision in decided:
            match decision:
                case Route(session, RouteAssigned(own_number, number, version)):
                    turn = (session, own_number)
                    assert turn in self.waiting, "routed twice, or after its end"
                    policy, served = self.serves[number]
                    request = self.turns[turn]
                    assert (request.policy, version) == (policy, served)
                    assert request.oldest <= version and (request.newest is None or version <= request.newest)
                    self.waiting.remove(turn)
                    self.at[turn] = number
                case Refuse(turn, newest):
                    assert turn in self.waiting
                    request = self.turns.pop(turn)
                    assert request.newest is not None and request.newest < newest
                    assert newest == self.published[request.policy]
                    self.waiting.remove(turn)
                case Load(number, policy, version):
                    assert number in self.numbers.values() and version == self.published[policy]
                    self.serves.pop(number, None)
                    self.to_load[number] = (policy, version)
                case Installed(policy, version):
                    assert self.publishing.pop(policy) == version
                case Probe(number):
                    assert number in self.suspects
                case Changed(number, name, policy, state):
                    if state is InstanceState.GONE:
                        self.forget(number, name)
                    elif state is InstanceState.SUSPECTED:
                        self.suspects.setdefault(number, self.serves.pop(number, None))
                        self.serves.pop(number, None)
                    elif state is InstanceState.DRAINING:
                        self.serves.pop(number, None)
                    elif state is InstanceState.SERVING:
                        self.policies[name] = policy
                case Moved(number, name, giver, taker):
                    assert self.serves.pop(number)[0] == giver != taker
                    assert not {giver, taker} & self.publishing.keys() or not self.has_instance(taker)
                    assert any(of == giver for of, _ in self.serves.values()), "each policy keeps an instance"
                    self.draining[number] = taker
                    if giver == A:  # its turns are interrupted
                        del self.draining[number]
                        self.policies[name] = taker
                    self.moved_if_drained(number)
                case NoInstances(policy, _, reason):
                    assert "link" in reason or not any(of == policy for of, _ in self.serves.values())

    def has_instance(self, policy: PolicyName) -> bool:
        loading = [of for number, (of, _) in self.to_load.items() if number not in self.suspects]
        return policy in (*loading, *self.draining.values(), *(of for of, _ in self.serves.values()))

    def forget(self, number: int, name: str) -> None:
        for books in (self.serves, self.to_load, self.draining, self.suspects):
            books.pop(number, None)
        if self.numbers.get(name) == number:
            del self.numbers[name]
        for turn in [turn for turn, at in self.at.items() if at == number]:
            del self.at[turn], self.turns[turn]  # its rollout actor asks again, with another number

    # ------------------------------------------------------------------ events

    @rule(seconds=st.sampled_from([0.0, 0.5, 20.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.decide()

    @rule(
        session=st.integers(1, 2),
        policy=st.sampled_from([A, B]),
        later=st.integers(-1, 1),
        open_ended=st.booleans(),
        tokens=st.integers(0, 50),
        behind=st.sampled_from([0.0, 100.0]),
        prefix=st.sampled_from(["p", "q", ""]),
        count=st.integers(1, 4),
    )
    def ask(
        self, session: int, policy: PolicyName, later: int, open_ended: bool, tokens: int, behind: float,
        prefix: str, count: int,
    ) -> None:  # fmt: skip
        for _ in range(count):
            oldest = Version(max(0, self.published.get(policy, 0) + later))
            self.next_turn += 1
            newest = None if open_ended else oldest
            request = RouteRequest(self.next_turn, policy, oldest, newest, tokens, behind, prefix)
            self.turns[session, self.next_turn] = request
            self.waiting.add((session, self.next_turn))
            self.router.requested(session, request, self.now)
        self.decide()

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), tokens=st.integers(0, 30), lost=st.booleans())
    def end_turn(self, data: st.DataObject, tokens: int, lost: bool) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.turns))), tokens, lost=lost)
        self.decide()

    def end(self, turn: tuple[int, int], tokens: int, *, lost: bool = False) -> None:
        number = self.at.pop(turn, None)
        self.waiting.discard(turn)
        del self.turns[turn]
        self.router.ended(*turn, 0 if lost else tokens, self.now, lost=lost)
        self.moved_if_drained(number)

    @rule(session=st.integers(1, 2))
    def end_session(self, session: int) -> None:
        ended = [turn for turn in self.turns if turn[0] == session]
        numbers = {self.at.pop(turn, None) for turn in ended}
        for turn in ended:
            self.waiting.discard(turn)
            del self.turns[turn]
        self.router.session_ended(session, self.now)
        for number in numbers:
            self.moved_if_drained(number)
        self.decide()

    def moved_if_drained(self, number: int | None) -> None:
        if number in self.draining and number not in self.suspects and number not in self.at.values():
            assert number is not None
            policy = self.draining.pop(number)
            if policy is not None:
                self.policies[self.router.name_of(number)] = policy

    @rule(name=st.sampled_from(NAMES), policy=st.sampled_from([A, B]), capacity=st.integers(1, 3))
    def join(self, name: str, policy: PolicyName, capacity: int) -> None:
        if name in self.numbers:
            self.forget(self.numbers[name], name)
        (number,) = self.router.joined(name, (policy,), capacity, self.now)
        self.numbers[name], self.policies[name], self.capacities[name] = number, policy, capacity
        self.decide()
        assert (number in self.to_load) == (policy in self.published)

    @rule(policy=st.sampled_from([A, B]))
    def publish(self, policy: PolicyName) -> None:
        version = self.published.get(policy, -1) + 1
        self.published[policy] = self.publishing[policy] = version
        self.router.published(policy, Version(version), self.now)
        self.decide()

    @precondition(lambda self: self.to_load)
    @rule(data=st.data())
    def load_ends(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.to_load)))
        policy, version = self.to_load.pop(number)
        if number in self.suspects:
            del self.suspects[number]
            self.draining.pop(number, None)
        if number not in self.draining and version == self.published[policy]:
            self.serves[number] = (policy, version)
        self.router.loaded(number, Version(version), self.now)
        self.decide()

    @precondition(lambda self: self.to_load)
    @rule(data=st.data(), may_pass=st.booleans())
    def load_fails(self, data: st.DataObject, may_pass: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.to_load)))
        del self.to_load[number]
        report = self.router.read_failed if may_pass else self.router.failed
        report(number, "its link is cut", self.now)
        if self.router.suspected_policy(number) is None:
            self.suspects.pop(number, None)
        else:
            self.suspects.setdefault(number, None)
        self.decide()

    @precondition(lambda self: self.numbers)
    @rule(data=st.data())
    def suspect(self, data: st.DataObject) -> None:
        number = self.numbers[data.draw(st.sampled_from(sorted(self.numbers)))]
        self.suspects.setdefault(number, self.serves.pop(number, None))
        self.draining.pop(number, None)
        self.router.suspected(number, "silent", self.now)
        self.decide()

    @precondition(lambda self: self.suspects)
    @rule(data=st.data(), holds_version=st.booleans())
    def trust(self, data: st.DataObject, holds_version: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.suspects)))
        served = self.suspects.pop(number)
        version = served[1] if served is not None and holds_version else None
        if served is not None and version is not None and version == self.published[served[0]]:
            self.serves[number] = served
        self.router.trusted(number, None if version is None else Version(version), self.now)
        self.decide()

    @precondition(lambda self: self.numbers)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.router.lost(self.numbers[data.draw(st.sampled_from(sorted(self.numbers)))], "killed", self.now)
        self.decide()

    @precondition(lambda self: self.numbers)
    @rule(policy=st.sampled_from([A, B]), count=st.integers(0, 6), installed=st.booleans())
    def balance(self, policy: PolicyName, count: int, installed: bool) -> None:
        if installed:
            self.load_all()
        self.ask(1, policy, 0, True, 5, 0.0, "", count)
        self.router.balance(self.now)
        self.decide()

    @precondition(lambda self: self.numbers)
    @rule(data=st.data(), moves_to=st.sampled_from([A, B, None]))
    def drain(self, data: st.DataObject, moves_to: PolicyName | None) -> None:
        number = self.numbers[data.draw(st.sampled_from(sorted(self.numbers)))]
        self.serves.pop(number, None)
        self.suspects.pop(number, None)
        self.to_load.pop(number, None)
        self.draining[number] = moves_to
        self.router.drain(number, self.now, moves_to)
        self.moved_if_drained(number)
        self.decide()

    # ------------------------------------------------------------------ rules that hold after every event

    @invariant()
    def no_instance_has_more_turns_than_it_can_have(self) -> None:
        for name, number in self.numbers.items():
            assert list(self.at.values()).count(number) <= self.capacities[name]

    @invariant()
    def no_turn_waits_that_could_be_routed(self) -> None:
        """While a version is being installed, instances that serve may have their share already."""
        for turn in self.waiting:
            request = self.turns[turn]
            for name, number in self.numbers.items():
                if request.policy in self.publishing or number not in self.serves:
                    continue
                policy, version = self.serves[number]
                if policy == request.policy and request.oldest <= version:
                    assert list(self.at.values()).count(number) == self.capacities[name], turn

    @invariant()
    def every_turn_is_waiting_or_at_an_instance(self) -> None:
        assert self.waiting | self.at.keys() == self.turns.keys()

    def teardown(self) -> None:
        """All instances come, and one after the other all turns are routed and end."""
        if not hasattr(self, "router"):
            return
        for policy in (A, B):
            self.publish(policy)
            self.join(f"last {policy}", policy, 2)
            self.time_passes(0.0)
        self.load_all()
        for _ in range(len(self.turns) + 1):
            for turn in sorted(self.at):
                self.end(turn, 3)
            self.decide()
        assert all(self.turns[turn].oldest > self.published[self.turns[turn].policy] for turn in self.waiting)
        assert not self.at

    def load_all(self) -> None:
        while self.to_load:
            number = min(self.to_load)
            policy, version = self.to_load.pop(number)
            self.suspects.pop(number, None)
            if number not in self.draining:
                self.serves[number] = (policy, version)
            self.router.loaded(number, Version(version), self.now)
            self.decide()


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=75, stateful_step_count=40)
