"""Trajectories that branch: candidates of one prompt, copies of environments, lines that end, and mistakes by name."""

import asyncio
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.environments.environment import Environment
from flexmarl.actors.environments.tree_play import TreeEnd, branch_problem, play_tree
from flexmarl.actors.errors import InvalidEnvironment, LimitReached
from flexmarl.actors.messages import Query
from flexmarl.actors.trees.branch_rule import BranchRule, Candidate, TreePlace
from flexmarl.actors.trees.entropy import EntropyRule
from flexmarl.actors.trees.greedy import GreedyRule
from flexmarl.actors.trees.predicted import PredictedRule
from flexmarl.actors.trees.success_model import FEATURES, SuccessModel, prefix_features
from flexmarl.actors.workflow import Rewards, Turn

QUERY = Query("q", "0")


class Drawn:
    """An agent whose turns are numbered over the trajectory, as a rollout worker's are. ``answers``: by number."""

    def __init__(
        self, answers: Callable[[int], str], limit: int | None = None, probability: float = 0.5
    ) -> None:
        self.prompts: list[Any] = []
        self._answers, self._limit, self._probability = answers, limit, probability

    async def generate(self, prompt: Any, **options: Any) -> Turn:
        number = len(self.prompts)
        if number == self._limit:
            raise LimitReached("solver", "rollout.trajectory_turns", number)
        self.prompts.append(prompt)
        for _ in range(number * 7 % 3):  # some take longer
            await asyncio.sleep(0)
        logprobs = (math.log(self._probability),)
        return Turn("solver", self._answers(number), (), (1,), f"t{number}", logprobs=logprobs)


class Sum(Environment):
    """Three numbers are added. Each turn earns its number, and the end the sum."""

    opened: ClassVar[list["Sum"]] = []

    async def reset(self, query: Query) -> Any:
        Sum.opened.append(self)
        self.numbers: list[Turn] = []
        self.ends = 0
        return {"solver": query.text}

    async def step(self, turns: Mapping[str, Turn]) -> Any:
        self.numbers = [*self.numbers, turns["solver"]]
        return self.paid() if len(self.numbers) == 3 else {"solver": f"{self.total:g}"}

    @property
    def total(self) -> float:
        return sum(float(turn.text) for turn in self.numbers)

    def paid(self) -> Rewards:
        rewards = Rewards(metrics={"total": self.total})
        for turn in self.numbers:
            rewards.of(turn, float(turn.text))
        return rewards

    async def fork(self) -> "Environment":
        copied = copy.copy(self)
        Sum.opened.append(copied)
        return copied

    async def interim(self) -> Rewards:
        return self.paid()

    async def truncated(self, limit: LimitReached) -> Rewards:
        return self.paid()

    async def end(self) -> None:
        self.ends += 1


class ReplayedSum(Sum):
    replays = True
    fork = Environment.fork


@pytest.fixture(autouse=True)
def opened() -> list[Sum]:
    Sum.opened = []
    return Sum.opened


async def played(
    rule: BranchRule, answers: Callable[[int], str] = str, cls: type[Environment] = Sum, **agent: Any
) -> tuple[TreeEnd, list[Any]]:
    solver = Drawn(answers, **agent)
    tree = await play_tree(cls, QUERY, {"solver": solver}, rule)
    return tree, [
        says if isinstance(says, str) else [p if isinstance(p, str) else p.text for p in says]
        for says in solver.prompts
    ]


@pytest.mark.parametrize("cls", [Sum, ReplayedSum])
async def test_greedy_continues_the_best_candidate_and_all_of_a_group_have_one_prompt(
    cls: type[Sum], opened: list[Sum]
) -> None:
    scores = [1, 3, 2, 0, 5, 4, 1, 1, 0]
    tree, prompts = await played(GreedyRule(width=3), lambda number: str(scores[number]), cls)
    assert prompts == [*["0"] * 3, *[["3", "3"]] * 3, *[["5", "8"]] * 3]
    (whole,) = (end for end in tree.ends if not end.was_cut)
    assert whole.sample_ids == {"t1", "t4", "t6"} and whole.rewards.metrics == {"total": 9.0}
    assert sorted(min(end.sample_ids - whole.sample_ids) for end in tree.ends if end.was_cut) == [
        "t0", "t2", "t3", "t5", "t7", "t8",
    ]  # fmt: skip
    assert tree.places == {f"t{number}": TreePlace(number // 3, 0) for number in range(9)}
    assert (tree.nodes, tree.cut_lines) == (3, 6)
    assert [environment.ends for environment in opened] == [1] * len(opened), "each has ended, once"


async def test_lines_of_entropy_run_to_their_ends_and_share_the_turns_before_them() -> None:
    rule = EntropyRule(width=2, lines=3, entropy=math.log(2.0), least_confidence=0.0, tail=1)
    tree, prompts = await played(rule)
    # Round 1: a certain line branches in two (1 + 1 * 1 * 1). Then 1 + 1 * 1 * 0.5 = 1.5, rounded to 2, has room once.
    assert prompts[:2] == ["0", "0"] and tree.nodes == 2 and len(tree.ends) == 3 and tree.cut_lines == 0
    shared = [t for t in tree.places if sum(t in end.sample_ids for end in tree.ends) > 1]
    assert len(shared) == 1, "the first turn of the line that branched again"
    for end in tree.ends:
        assert len(end.sample_ids) == 3 and not end.was_cut
        assert {turn.sample_id for turn, _ in end.rewards.turns} == end.sample_ids


async def test_a_line_without_branches_is_a_trajectory_as_without_a_tree(opened: list[Sum]) -> None:
    tree, prompts = await played(EntropyRule(width=4), probability=1.0)
    assert prompts == ["0", ["0", "0"], ["1", "1"]]
    assert tree.places == {f"t{n}": TreePlace(-1, n) for n in range(3)} and tree.nodes == 0
    assert len(opened) == 1, "and needs no copy"


async def test_turns_are_counted_from_the_last_branch_point_of_their_line() -> None:
    class Second(EntropyRule):
        def candidates(self, seen: Sequence[Candidate], room: int) -> int:
            return self.width if len(seen) == 1 and len(seen[0].past) == 1 else max(1, len(seen))

    tree, _ = await played(Second(width=2))
    assert tree.places == {
        "t0": TreePlace(-1, 0),
        **{f"t{number}": TreePlace(0, 0) for number in (1, 2)},
        **{f"t{number}": TreePlace(0, 1) for number in (3, 4)},
    }


async def test_a_limit_ends_all_lines_with_the_rewards_until_then(opened: list[Sum]) -> None:
    rule = EntropyRule(width=2, lines=2, entropy=0.1, least_confidence=0.0)
    tree, _ = await played(rule, limit=3)
    assert [end.sample_ids for end in tree.ends] == [{"t0"}, {"t1"}], (
        "the turns of the last round belong to no line"
    )
    assert [environment.ends for environment in opened] == [1, 1]


async def test_an_error_of_one_line_ends_all_environments(opened: list[Sum]) -> None:
    with pytest.raises(ValueError, match="could not convert"):
        await played(GreedyRule(width=3), lambda number: "x" if number == 4 else "1")
    assert len(opened) == 5 and all(environment.ends == 1 for environment in opened)


async def test_a_cancelled_tree_ends_its_environments(opened: list[Sum]) -> None:
    class Waits(Sum):
        async def step(self, turns: Mapping[str, Turn]) -> Any:
            began.set()
            await asyncio.Event().wait()

    began = asyncio.Event()
    task = asyncio.create_task(played(GreedyRule(width=3), cls=Waits))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(opened) == 3 and all(environment.ends == 1 for environment in opened)


@given(st.integers(1, 4), st.integers(1, 6), st.floats(0.01, 1.0))
def test_every_tree_has_whole_lines_and_no_more_than_it_may(
    width: int, lines: int, probability: float
) -> None:
    rule = EntropyRule(width=width, lines=lines, entropy=0.5)
    Sum.opened = []
    tree, prompts = asyncio.run(played(rule, probability=probability))
    assert 1 <= len(tree.ends) <= max(lines, 1)
    assert all(len(end.sample_ids) == 3 for end in tree.ends)
    assert set(tree.places) == {f"t{number}" for number in range(len(prompts))}
    assert all(environment.ends == 1 for environment in Sum.opened)


def test_environments_that_cant_branch_are_named() -> None:
    class Bare(Environment):
        async def reset(self, query: Query) -> Any: ...
        async def step(self, turns: Mapping[str, Turn]) -> Any: ...

    class Replays(Bare):
        replays = True

    assert "the workflow is a function" in str(branch_problem(None, GreedyRule()))
    assert "Bare can't branch: define `async def fork(self)`" in str(branch_problem(Bare, EntropyRule()))
    assert "Replays has no `async def interim(self)`" in str(branch_problem(Replays, GreedyRule()))
    assert branch_problem(Replays, EntropyRule()) is None and branch_problem(Sum, GreedyRule()) is None


class Unpaid(Sum):
    async def interim(self) -> Rewards:
        return Rewards()


class Repaid(Sum):
    def paid(self) -> Rewards:
        return super().paid().of(self.numbers[0], float(len(self.numbers) == 3))


class Itself(Sum):
    async def fork(self) -> "Environment":
        return self


class Nothing(Sum):
    async def fork(self) -> Any:
        return None


class Moody(ReplayedSum):
    async def reset(self, query: Query) -> Any:
        return await super().reset(Query("q", str(len(Sum.opened))))


@pytest.mark.parametrize(
    ("cls", "problem"),
    [
        (Unpaid, "Unpaid: turn t0 of solver has no reward when a step has taken it"),
        (Repaid, "Repaid: turn t0 was compared by its reward 1, and has 2 in the end"),
        (Itself, "Itself.fork returned an environment that is in use"),
        (Nothing, "Nothing.fork returned NoneType"),
        (Moody, "Moody asks for something else after the same 0 rounds"),
    ],
)
async def test_environments_that_break_the_rules_fail_their_trajectory(cls: type[Sum], problem: str) -> None:
    with pytest.raises(InvalidEnvironment, match=problem):
        await played(GreedyRule(width=2), lambda number: "1", cls)
    assert all(environment.ends == 1 for environment in Sum.opened)


class Marked(Sum):
    """Succeeds if its numbers add up to 10 or more."""

    def paid(self) -> Rewards:
        return Rewards(solver=float(self.total >= 10), metrics={"accuracy": float(self.total >= 10)})


async def test_prefixes_have_the_share_of_their_lines_that_succeeded() -> None:
    rule = PredictedRule(width=2, lines=4, gain=0.4)
    numbers = [1, 5, 0, 9, 2, 3, 4, 0, 0, 0]
    tree, prompts = await played(rule, lambda number: str(numbers[number]), Marked)
    # All prefixes have 1/2: the first round branches in two, the second in four, then there is no room.
    assert prompts[:2] == ["0", "0"] and len(tree.ends) == 4
    root, *others = tree.prefixes
    assert root.features == prefix_features({"solver": "0"}, 0) and root.lines == 4
    assert root.success == sum(end.rewards.metrics["accuracy"] for end in tree.ends) / 4
    assert [prefix.lines for prefix in others] == [2, 1, 1, 2, 1, 1]
    assert {prefix.excess for prefix in tree.prefixes} == {None}
    assert sum(prefix.success * prefix.lines for prefix in others) == 2 * root.success * 4


async def test_the_price_of_a_step_makes_trees_narrower_and_their_root_has_their_excess() -> None:
    rule = PredictedRule(width=2, lines=4, gain=0.4, mean_lines=2.5)
    free, dear = SuccessModel(), SuccessModel([*[0.0] * FEATURES, 2.0])
    trees = [await play_tree(Marked, QUERY, {"solver": Drawn(str)}, rule, model) for model in (free, dear)]
    assert [len(tree.ends) for tree in trees] == [4, 1], "a candidate adds 0.5, and costs 0.4 or 0.8"
    roots = [tree.prefixes[0] for tree in trees]
    assert [root.excess for root in roots] == [4 / 2.5 - 1, 1 / 2.5 - 1]
    assert [[end.excess for end in tree.prefixes[1:]] for tree in trees] == [[None] * 6, [None] * 2]


async def test_branches_are_where_success_is_least_certain() -> None:
    weights = [*[0.0] * FEATURES, 1.0]
    for place in prefix_features({"solver": "0"}, 0):
        weights[place] = 9.0
    rule = PredictedRule(width=3, lines=2, gain=0.2)
    solver = Drawn(lambda number: str(number + 3))
    tree = await play_tree(Marked, QUERY, {"solver": solver}, rule, SuccessModel(weights))
    assert [type(says) for says in solver.prompts] == [str, *[list] * 4], (
        "one of the sure prompt, two from then on"
    )
    assert tree.nodes == 1 and {place.ordinal for place in tree.places.values()} == {0, 1}


async def test_the_room_goes_to_the_prefix_nearest_to_one_half() -> None:
    weights = [*[0.0] * FEATURES, 1.0]
    # The prompts of round 1 are "0" and "1": a line that has drawn 0 is nearly sure to succeed.
    for place in set(prefix_features({"solver": "0"}, 1)) - set(prefix_features({"solver": "1"}, 1)):
        weights[place] = 9.0
    rule = PredictedRule(width=2, lines=3, gain=0.0)
    solver = Drawn(str)
    tree = await play_tree(Marked, QUERY, {"solver": solver}, rule, SuccessModel(weights))
    second = [says for says in solver.prompts if len(says) == 2][:3]
    assert tree.nodes == 2 and sorted(says[-1] for says in second) == ["0", "1", "1"]


async def test_rules_that_do_not_predict_have_no_prefixes() -> None:
    tree, _ = await played(GreedyRule(width=2))
    assert tree.prefixes == () and all(end.prefixes == () for end in tree.ends)
