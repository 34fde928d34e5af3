"""kitchen: the orders, the actions that are refused, the collaboration score, and the dispatcher's rewards."""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.environments.environment import play
from flexmarl.actors.errors import RecipeError
from flexmarl.actors.recipe.recipe import Recipe
from flexmarl.actors.workflow import Query
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.recipes.kitchen.workflow import (
    ACTIONS,
    Dispatch,
    IllegalAction,
    Kitchen,
    collaboration_score,
    kitchen_of,
    legal_actions,
)

from .scripted import Scripted

QUERY = Query(
    "q", "", {"dishes": "ab", "interval": 3, "lifetime": 6, "hands": "..", "pots": "..", "places": 2}
)
KITCHENS = st.builds(
    Kitchen,
    dishes=st.text("ab", min_size=1, max_size=6),
    interval=st.integers(1, 6),
    lifetime=st.integers(1, 9),
    hands=st.text(".abAB", min_size=1, max_size=3),
    pots=st.text(".AB", min_size=1, max_size=3),
)
Rule = Callable[[Kitchen], str]
ANSWERS = st.lists(st.text(st.sampled_from([*ACTIONS, "?"]), max_size=4), max_size=60)


def recipe(*settings: str) -> Recipe:
    return Recipe(resolve("kitchen", settings).recipe_config())


def after(kitchen: Kitchen, *answers: str) -> Kitchen:
    """The kitchen after steps of which no action is refused."""
    for answer in answers:
        outcome = kitchen.step(answer)
        assert not outcome.refused
        kitchen = outcome.kitchen
    return kitchen


def test_an_order_is_completed_in_five_steps() -> None:
    kitchen = Kitchen("ab", 3, 6, "..", "..")
    assert kitchen.text(2) == "a6..|..|..="
    kitchen = after(kitchen, "a.")
    assert kitchen.text(2) == "a5..|a.|..="
    kitchen = after(kitchen, "p.")
    assert kitchen.text(2) == "a4..|..|a.="
    kitchen = after(kitchen, "..")
    assert kitchen.text(2) == "a3b6|..|A.=", "cooked, and the second order has come"
    kitchen = after(kitchen, ".A")
    assert kitchen.text(2) == "a2b5|.A|..="
    kitchen = after(kitchen, ".s")
    assert kitchen.text(2) == "b4..|..|..=" and kitchen.completed == (0,)


def test_an_order_fails_when_its_time_is_over() -> None:
    kitchen = after(Kitchen("ab", 3, 6, "..", ".."), *[".."] * 5)
    assert (kitchen.orders, kitchen.failed) == ((0, 1), ())
    kitchen = after(kitchen, "..")
    assert (kitchen.orders, kitchen.failed) == ((1,), (0,))
    kitchen = after(kitchen, *[".."] * 3)
    assert kitchen.is_over and kitchen.failed == (0, 1)


def test_a_dish_completes_the_order_that_expires_first() -> None:
    kitchen = after(Kitchen("aba", 1, 9, "A", "."), ".", ".", "s")
    assert kitchen.completed == (0,) and kitchen.orders == (1, 2)


@pytest.mark.parametrize(
    ("hands", "pots", "action", "problem"),
    [
        ("..", "..", "p", "it holds no ingredient; get one first"),
        ("A.", "..", "p", "it holds no ingredient; get one first"),
        ("a.", "AB", "p", "no pot is free; take a dish first"),
        ("..", ".B", "A", "no pot has that dish, cooked; put its ingredient into one first"),
        ("..", ".a", "A", "no pot has that dish, cooked; put its ingredient into one first"),
        ("a.", "..", "s", "it holds no cooked dish; take one first"),
        ("B.", "..", "s", "no order of dish b is open; wait for one"),
        ("..", "..", "?", "there is no such action, but a b p A B s ."),
        ("..", "..", "", "there is no such action, but a b p A B s ."),
    ],
)
def test_an_action_that_is_not_possible_is_refused_by_name(
    hands: str, pots: str, action: str, problem: str
) -> None:
    kitchen = Kitchen("a", 3, 6, hands, pots)
    sentence = f"worker 1 can't do {action!r} in step 0: {problem}"
    with pytest.raises(IllegalAction) as raised:
        kitchen.act(0, action)
    assert str(raised.value) == sentence
    if action:
        outcome = kitchen.step(f"{action}.")
        assert outcome.refused == (sentence,)
        assert outcome.kitchen == kitchen.step("..").kitchen, "its worker waits"


def test_the_second_worker_finds_the_kitchen_as_the_first_one_leaves_it() -> None:
    outcome = Kitchen("a", 3, 6, "ab", "A.").step("pp")
    assert outcome.kitchen.pots == "Aa"
    assert outcome.refused == ("worker 2 can't do 'p' in step 0: no pot is free; take a dish first",)
    assert after(Kitchen("a", 3, 6, ".b", "AA"), "Ap").pots == "bA"
    assert Kitchen("a", 3, 6, "..", "..").step("...").refused == ("3 actions are more than the 2 workers",)


@given(KITCHENS, ANSWERS)
def test_every_order_has_one_end_whatever_is_done(kitchen: Kitchen, answers: list[str]) -> None:
    for answer in answers:
        was, outcome = kitchen, kitchen.step(answer)
        kitchen = outcome.kitchen
        come = [n for n in range(len(kitchen.dishes)) if n * kitchen.interval <= kitchen.time]
        ended = [*kitchen.completed, *kitchen.failed]
        assert sorted([*kitchen.orders, *ended]) == come, "open, completed or failed, and only one of these"
        assert all(n * kitchen.interval + kitchen.lifetime > kitchen.time for n in kitchen.orders)
        served = len(kitchen.completed) - len(was.completed)
        assert 0 <= served <= answer.count("s")
        assert served <= sum(held in "AB" for held in was.hands), "a dish that is held is served once"
        assert outcome.gain <= 0.25 * len(was.hands), "an action makes one part of an order"
        assert len(kitchen.text(9)) == len(was.text(9))
    assert kitchen.is_over == (len(kitchen.completed) + len(kitchen.failed) == len(kitchen.dishes))


@given(KITCHENS, ANSWERS)
def test_the_same_actions_lead_to_the_same_kitchen(kitchen: Kitchen, answers: list[str]) -> None:
    one = other = kitchen
    for answer in answers:
        one, other = one.step(answer).kitchen, other.step(answer).kitchen
        assert one == other and hash(one) == hash(other)


@given(KITCHENS, st.integers(0, 99))
def test_an_action_is_refused_unless_it_is_legal(kitchen: Kitchen, seed: int) -> None:
    random = Random(seed)
    while not kitchen.is_over:
        for worker, action in product(range(len(kitchen.hands)), ACTIONS):
            if action in kitchen.legal(worker):
                kitchen.act(worker, action)
            else:
                with pytest.raises(IllegalAction):
                    kitchen.act(worker, action)
        outcome = kitchen.step(legal_actions(kitchen, random))
        assert not outcome.refused
        kitchen = outcome.kitchen


def test_progress_counts_no_part_twice() -> None:
    one_order = Kitchen("a", 3, 6, "..", "..")
    assert one_order.step("a.").gain == 0.25
    assert one_order.step("aa").gain == 0.25, "two workers for one order"
    assert one_order.step("b.").gain == 0.0
    two_orders = after(Kitchen("aa", 1, 9, "..", ".."), "..")
    assert two_orders.step("aa").gain == 0.5
    assert Kitchen("a", 3, 6, "A.", "..").step("s.").gain == 0.25
    assert Kitchen("a", 3, 6, "A.", "..").step("b.").gain == -0.75, "a dish is thrown away"


def test_the_collaboration_score_by_hand() -> None:
    """Intervals of 2, 4 and 6 steps: (3/6 + 3/4 + 2/2) / 3 = 0.75, where 8/12 of all orders are completed."""
    assert collaboration_score({2: (3, 3), 4: (3, 1), 6: (2, 0)}) == pytest.approx(0.75)
    assert collaboration_score({2: (0, 5)}) == 0.0


@pytest.mark.parametrize(
    ("counts", "refused"), [({}, "at least one interval"), ({2: (1, 1), 3: (0, 0)}, "interval 3: no order")]
)
def test_a_score_of_nothing_is_refused(counts: dict[int, tuple[int, int]], refused: str) -> None:
    with pytest.raises(ValueError, match=refused):
        collaboration_score(counts)


async def test_a_turn_is_paid_for_the_progress_that_it_makes() -> None:
    dispatcher = Scripted("dispatcher", "a.", "pp", "..", "A.", "s.", "..")
    rewards = (await play(Dispatch(), QUERY, {"dispatcher": dispatcher})).checked()
    assert dispatcher.prompts[:3] == ["a6..|..|..=", "a5..|a.|..=", "a4..|..|a.="]
    assert len(dispatcher.prompts) == 9, "until the second order fails"
    assert [reward for _, reward in rewards.turns] == [0.25, 0.0, 0.0, 0.25, 0.25, 0.0, 0.0, 0.0, 0.0]
    assert rewards.metrics == {
        "collaboration_score": 0.5, "completed_3": 0.5, "refused_actions": pytest.approx(1 / 18)
    }  # fmt: skip


async def test_the_mean_over_the_games_of_an_evaluation_is_the_score_over_all_intervals() -> None:
    random, ends, shares = Random(0), [], []
    for number, query in enumerate(recipe("data.eval_games=3").eval_queries()):
        end, answers = played(query, best if number % 2 else lambda kitchen: legal_actions(kitchen, random))
        rewards = await play(Dispatch(), query, {"dispatcher": Scripted("dispatcher", *answers)})
        ends.append(end)
        shares.append(rewards.metrics["collaboration_score"])
    counts = counts_of(ends)
    assert sorted(counts) == [2, 3, 4, 5, 6] and 0.2 < fmean(shares) < 0.9
    assert fmean(shares) == pytest.approx(collaboration_score(counts))


def best(kitchen: Kitchen, actions: Sequence[str] = ACTIONS) -> str:
    """The answer with the largest gain in this step, the second worker's action being one of ``actions``."""

    def gain(answer: str) -> tuple[float, bool]:
        outcome = kitchen.step(answer)
        return outcome.gain - len(outcome.refused), answer == ".."

    return max(map("".join, product(ACTIONS, actions)), key=gain)


def played(query: Query, rule: Rule) -> tuple[Kitchen, list[str]]:
    """The kitchen at the end of a game, and all answers of the rule."""
    kitchen, answers = kitchen_of(query.data), list[str]()
    while not kitchen.is_over:
        answers.append(rule(kitchen))
        kitchen = kitchen.step(answers[-1]).kitchen
    return kitchen, answers


def counts_of(ends: Iterable[Kitchen]) -> dict[int, tuple[int, int]]:
    counts: dict[int, tuple[int, int]] = {}
    for end in ends:
        completed, failed = counts.get(end.interval, (0, 0))
        counts[end.interval] = (completed + len(end.completed), failed + len(end.failed))
    return counts


def test_only_workers_that_are_dispatched_together_complete_most_orders() -> None:
    """One of two workers is too slow, and random actions nearly always are."""
    games, random = recipe().eval_queries(), Random(0)

    def score_of(rule: Rule) -> float:
        return collaboration_score(counts_of(played(query, rule)[0] for query in games))

    assert score_of(lambda kitchen: legal_actions(kitchen, random)) < 0.35
    alone = score_of(lambda kitchen: best(kitchen, "."))
    assert score_of(best) > alone + 0.1


@pytest.mark.parametrize(
    ("setting", "refused"),
    [
        ("data.lifetime=12", r"data\.lifetime=12: a prompt has one digit for it"),
        ("data.steps=4", r"at most data\.steps=4"),
        ("data.intervals=[0, 2]", r"data\.intervals=\[0, 2\]: an interval has at least 1 step"),
    ],
)
def test_games_that_can_not_be_are_refused(setting: str, refused: str) -> None:
    with pytest.raises(RecipeError, match=refused):
        recipe(setting).train_query(0)


def test_a_kitchen_with_too_few_games_to_hold_out_is_refused() -> None:
    settings = ("data.workers=0", "data.pots=0", "data.intervals=[20]")
    with pytest.raises(RecipeError, match="make too few different games"):
        recipe(*settings).eval_queries()
        recipe(*settings).train_query(0)
