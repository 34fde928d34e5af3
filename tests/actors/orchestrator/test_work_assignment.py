"""The distribution of work over workers that come and go."""

from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flexmarl.actors.orchestrator.work_assignment import WorkAssignment


def test_each_item_goes_to_the_worker_with_the_fewest() -> None:
    work_assignment: WorkAssignment[int] = WorkAssignment()
    work_assignment.enlist("a")
    assert work_assignment.deal([1, 2]) == {"a": [1, 2]}
    work_assignment.enlist("b")
    assert work_assignment.deal([3, 4, 5]) == {"b": [3, 4], "a": [5]}
    assert work_assignment.close("a", 1) and not work_assignment.close("a", 3), "which is b's"
    assert work_assignment.deal([6]) == {"a": [6]}


def test_items_wait_for_a_worker() -> None:
    work_assignment: WorkAssignment[int] = WorkAssignment()
    assert work_assignment.deal([1, 2]) == {}
    assert work_assignment.enlist("a") == {"a": [1, 2]}
    assert work_assignment.enlist("b") == {}


def test_the_open_items_of_a_lost_worker_are_dealt_again_and_not_closed_by_it() -> None:
    work_assignment: WorkAssignment[int] = WorkAssignment()
    work_assignment.enlist("a")
    work_assignment.deal([1, 2, 3])
    work_assignment.close("a", 2)
    assert work_assignment.lose("a") == [1, 3] and "a" not in work_assignment
    assert not work_assignment.close("a", 1) and work_assignment.lose("a") == []
    assert work_assignment.deal([1, 3]) == {}
    assert work_assignment.enlist("b") == {"b": [1, 3]}
    assert not work_assignment.close("a", 1) and work_assignment.close("b", 1)


def test_open_and_waiting_items_are_listed() -> None:
    work_assignment: WorkAssignment[int] = WorkAssignment()
    work_assignment.deal([1, 2])
    assert work_assignment.waiting == 2 and work_assignment.open_items("a") == []
    work_assignment.enlist("a")
    work_assignment.deal([3])
    work_assignment.close("a", 2)
    assert work_assignment.waiting == 0 and work_assignment.open_items("a") == [1, 3]
    work_assignment.lose("a")
    assert work_assignment.open_items("a") == [] and work_assignment.waiting == 0, (
        "they belong to no worker until they are dealt again"
    )


class Run(RuleBasedStateMachine):
    """Workers come, close what they have, and are lost; the model keeps the owner of every item."""

    @initialize()
    def begin(self) -> None:
        self.work_assignment: WorkAssignment[int] = WorkAssignment()
        self.workers: list[str] = []
        self.owner: dict[int, str | None] = {}
        self.made = 0
        self.closed: set[int] = set()

    def _dealt(self, dealt: dict[str, list[int]]) -> None:
        for worker, items in dealt.items():
            for item in items:
                assert self.owner[item] is None, "no item is dealt to two workers"
                self.owner[item] = worker

    @rule()
    def enlist(self) -> None:
        self.made += 1
        self.workers.append(f"worker-{self.made}")
        self._dealt(self.work_assignment.enlist(self.workers[-1]))

    @rule(count=strategies.integers(1, 5))
    def deal(self, count: int) -> None:
        first = len(self.owner)
        items = range(first, first + count)
        self.owner |= dict.fromkeys(items)
        loads = [self._load(worker) for worker in self.workers]
        self._dealt(self.work_assignment.deal(items))
        if loads:
            grown = [self._load(worker) for worker in self.workers]
            assert max(grown) <= max(max(loads), min(grown) + 1), "the fewest first"

    def _load(self, worker: str) -> int:
        return sum(owner == worker for item, owner in self.owner.items() if item not in self.closed)

    @precondition(lambda self: self.workers and self.owner)
    @rule(data=strategies.data())
    def close(self, data: strategies.DataObject) -> None:
        worker = data.draw(strategies.sampled_from(self.workers))
        item = data.draw(strategies.sampled_from(sorted(self.owner)))
        is_its_own = self.owner[item] == worker and item not in self.closed
        assert self.work_assignment.close(worker, item) == is_its_own
        if is_its_own:
            self.closed.add(item)

    @precondition(lambda self: self.workers)
    @rule(data=strategies.data())
    def lose(self, data: strategies.DataObject) -> None:
        """Some of its items had been put already; the others are dealt again."""
        worker = data.draw(strategies.sampled_from(self.workers))
        self.workers.remove(worker)
        lost = self.work_assignment.lose(worker)
        own = (item for item, owner in self.owner.items() if owner == worker)
        assert sorted(lost) == sorted(item for item in own if item not in self.closed)
        put = {item for item in lost if data.draw(strategies.booleans())}
        self.closed |= put
        again = [item for item in lost if item not in put]
        self.owner |= dict.fromkeys(again)
        self._dealt(self.work_assignment.deal(again))

    @invariant()
    def an_open_item_waits_only_if_there_is_no_worker(self) -> None:
        waiting = [item for item, owner in self.owner.items() if owner is None and item not in self.closed]
        assert not (waiting and self.workers)


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=50, stateful_step_count=40)
