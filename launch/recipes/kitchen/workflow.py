"""A dispatcher gives each worker of a kitchen an action in every step, while orders come at an interval and expire.

    a3b7....|.a|A.=     an order of dish a with 3 steps left, one of b with 7; the second worker holds the ingredient a;
                        a dish a is cooked in the first pot
    Ap                  the first worker takes that dish, and the second puts its ingredient into the free pot

After MindAgent's CuisineWorld (Gong et al., arXiv 2309.09971), where one model dispatches all workers too; without
places, so without its ``goto``. Its other actions are ``get``: ``a``, ``b``; ``put``: ``p``; ``get`` from a tool:
``A``, ``B``; ``put`` on the table: ``s``; and ``noop``: ``.``. An ingredient in a pot ``activates`` that. The SFT
teaches the actions that are possible, one as often as another. Reinforcement learning teaches to work together: two
workers that prepare the same order have made nothing for the next one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from random import Random
from statistics import fmean
from typing import Any
from zlib import crc32

from flexmarl.actors.environments.environment import Ask, Asked, Environment
from flexmarl.actors.workflow import Query, Rewards, Turn

DISHES, COOKED, NOTHING = "ab", "AB", "."
ACTIONS = (*DISHES, "p", *COOKED, "s", NOTHING)
REFUSED = 0.25
"""The cost of an action that is refused."""
_MOST_LEFT, _MOST_DRAWS = 9, 10_000


class IllegalAction(ValueError):
    """An action that its worker can't do: it waits."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """``gain``: of ``Kitchen.progress`` by the actions. ``refused``: a sentence for each action that was refused."""

    kitchen: "Kitchen"
    gain: float
    refused: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kitchen:
    """A kitchen between two steps, which never changes: ``step`` returns the next one.

    ``dishes``: of all orders. Order n comes at step ``n * interval``, and fails ``lifetime`` steps later. ``hands``,
    ``pots``: an ingredient is a small letter, a cooked dish a capital one. A pot cooks an ingredient during the step
    after the one that has put it there; then the dish can be taken. ``orders``: the numbers of those that are open.
    """

    dishes: str
    interval: int
    lifetime: int
    hands: str
    pots: str
    time: int = 0
    orders: tuple[int, ...] = (0,)
    completed: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()

    @property
    def is_over(self) -> bool:
        """True once every order is completed or failed."""
        return len(self.completed) + len(self.failed) == len(self.dishes)

    @property
    def progress(self) -> float:
        """The completed orders, and the parts of the open ones: a quarter for an ingredient in a worker's hands, a half
        for one in a pot, three quarters for a dish in hands. A part is of one order, the parts furthest on first."""
        stages = [(held, 0.75 if held in COOKED else 0.25) for held in self.hands]
        stages += [(held, 0.5) for held in self.pots]
        done = float(len(self.completed))
        for dish in DISHES:
            parts = sorted((part for held, part in stages if held.lower() == dish), reverse=True)
            done += sum(parts[: len(self._orders_of(dish))])
        return done

    def step(self, actions: str) -> Outcome:
        """The kitchen after one action of each worker, the first one first, and after a step of time."""
        kitchen, refused = self, []
        if len(actions) > len(self.hands):
            refused.append(f"{len(actions)} actions are more than the {len(self.hands)} workers")
        for worker in range(len(self.hands)):
            try:
                kitchen = kitchen.act(worker, actions[worker : worker + 1])
            except IllegalAction as problem:
                refused.append(str(problem))
        return Outcome(kitchen._later(self.pots), kitchen.progress - self.progress, tuple(refused))

    def act(self, worker: int, action: str) -> "Kitchen":
        """The kitchen after an action, within a step. An ingredient or a dish that a worker gets takes the place of
        what it holds. Raises IllegalAction."""
        if (problem := self._problem(worker, action)) is not None:
            raise IllegalAction(f"worker {worker + 1} can't do {action!r} in step {self.time}: {problem}")
        held = self.hands[worker]
        if action == NOTHING:
            return self
        if action == "p":
            pots = _with(self.pots, self.pots.index(NOTHING), held)
            return replace(self, hands=_with(self.hands, worker, NOTHING), pots=pots)
        if action == "s":
            order = self._orders_of(held.lower())[0]  # the one that expires first
            return replace(
                self,
                hands=_with(self.hands, worker, NOTHING),
                orders=tuple(number for number in self.orders if number != order),
                completed=(*self.completed, order),
            )
        pots = _with(self.pots, self.pots.index(action), NOTHING) if action in COOKED else self.pots
        return replace(self, hands=_with(self.hands, worker, action), pots=pots)

    def legal(self, worker: int) -> list[str]:
        """The actions that ``act`` does not refuse."""
        return [action for action in ACTIONS if self._problem(worker, action) is None]

    def text(self, places: int) -> str:
        """The prompt, which has the same length for the same number of ``places`` for orders."""
        orders = "".join(
            f"{self.dishes[order]}{order * self.interval + self.lifetime - self.time}"
            for order in self.orders
        )
        return f"{orders:.<{2 * places}}|{self.hands}|{self.pots}="

    def _problem(self, worker: int, action: str) -> str | None:
        held = self.hands[worker]
        if action not in ACTIONS:
            return f"there is no such action, but {' '.join(ACTIONS)}"
        if action == "p" and held not in DISHES:
            return "it holds no ingredient; get one first"
        if action == "p" and NOTHING not in self.pots:
            return "no pot is free; take a dish first"
        if action in COOKED and action not in self.pots:
            return "no pot has that dish, cooked; put its ingredient into one first"
        if action == "s" and held not in COOKED:
            return "it holds no cooked dish; take one first"
        if action == "s" and not self._orders_of(held.lower()):
            return f"no order of dish {held.lower()} is open; wait for one"
        return None

    def _orders_of(self, dish: str) -> list[int]:
        return [order for order in self.orders if self.dishes[order] == dish]

    def _later(self, pots_before: str) -> "Kitchen":
        """After the step: pots that had an ingredient at its begin have cooked it, orders fail, and one may come."""
        pots = "".join(
            pot.upper() if before in DISHES else pot
            for before, pot in zip(pots_before, self.pots, strict=True)
        )
        time = self.time + 1
        failed = tuple(order for order in self.orders if order * self.interval + self.lifetime <= time)
        orders = tuple(order for order in self.orders if order not in failed)
        if time % self.interval == 0 and time // self.interval < len(self.dishes):
            orders = (*orders, time // self.interval)
        return replace(self, pots=pots, time=time, orders=orders, failed=(*self.failed, *failed))


def collaboration_score(counts: Mapping[int, tuple[int, int]]) -> float:
    """MindAgent's collaboration score (Gong et al., arXiv 2309.09971, section 3):

        CoS = 1/M * sum over M intervals of completed / (completed + failed)

    the share of completed orders, as the mean over intervals between orders. So an interval with many orders weighs no
    more than another. ``counts``: completed and failed orders by interval. Raises ValueError without an interval, and
    for one without orders.
    """
    if not counts:
        raise ValueError("a collaboration score needs at least one interval")
    for interval, (completed, failed) in counts.items():
        if completed + failed < 1:
            raise ValueError(
                f"interval {interval}: no order has ended, so that there is no share of completed ones"
            )
    return fmean(completed / (completed + failed) for completed, failed in counts.values())


class Dispatch(Environment):
    """One game: each turn of the dispatcher is a step of the kitchen, whose gain is the turn's reward."""

    async def reset(self, query: Query) -> Asked:
        data = query.data
        self.kitchen, self.places = kitchen_of(data), data["places"]
        self.rewards, self.refused, self.actions = Rewards(), 0, 0
        return self.next_step()

    def next_step(self) -> Asked:
        return {"dispatcher": Ask(self.kitchen.text(self.places), new=True)}

    async def step(self, turns: Mapping[str, Turn]) -> Asked | Rewards:
        turn = turns["dispatcher"]
        outcome = self.kitchen.step(turn.text)
        self.rewards.of(turn, outcome.gain - REFUSED * len(outcome.refused))
        self.refused += len(outcome.refused)
        self.actions += len(self.kitchen.hands)
        self.kitchen = outcome.kitchen
        if not self.kitchen.is_over:
            return self.next_step()
        interval = self.kitchen.interval
        counts = {interval: (len(self.kitchen.completed), len(self.kitchen.failed))}
        share = collaboration_score(counts)
        # As many games of each interval: their mean is the score over all intervals.
        metrics = {"collaboration_score": share, f"completed_{interval}": share}
        self.rewards.metrics.update(metrics, refused_actions=self.refused / self.actions)
        return self.rewards


workflow = Dispatch


def train_query(position: int, seed: int, *, intervals: list[int], **data: Any) -> Query:
    """Intervals in turn."""
    random = Random(f"{seed} train {position}")
    interval = intervals[position % len(intervals)]
    return draw(f"q{position:06}", random, interval, held_out=False, intervals=intervals, **data)


def eval_queries(seed: int, *, intervals: list[int], eval_games: int, **data: Any) -> list[Query]:
    """``eval_games`` of each interval, that ``train_query`` never returns."""
    random = Random(f"{seed} evaluation")
    return [
        draw(f"e{interval}_{number:04}", random, interval, held_out=True, intervals=intervals, **data)
        for interval in intervals
        for number in range(eval_games)
    ]


def sft(agent: str, batch: int, size: int, seed: int, **data: Any) -> list[tuple[str, str]]:
    """Steps of games in which each worker does any action that is possible."""
    random = Random(f"{seed} SFT {agent} {batch}")
    examples: list[tuple[str, str]] = []
    while len(examples) < size:
        query = train_query(random.randrange(10**9), seed, **data)
        kitchen = kitchen_of(query.data)
        while not kitchen.is_over:
            actions = legal_actions(kitchen, random)
            examples.append((kitchen.text(query.data["places"]), actions))
            kitchen = kitchen.step(actions).kitchen
    return random.sample(examples, size)


def legal_actions(kitchen: Kitchen, random: Random) -> str:
    """An action of each worker that is possible after those of the workers before it."""
    actions = ""
    for worker in range(len(kitchen.hands)):
        actions += random.choice(kitchen.legal(worker))
        kitchen = kitchen.act(worker, actions[-1])
    return actions


def kitchen_of(data: Mapping[str, Any]) -> Kitchen:
    """The kitchen at the begin of a query's game."""
    return Kitchen(data["dishes"], data["interval"], data["lifetime"], data["hands"], data["pots"])


def draw(
    name: str,
    random: Random,
    interval: int,
    held_out: bool,
    *,
    intervals: list[int],
    steps: int,
    lifetime: int,
    workers: int,
    pots: int,
    eval_games: int = 0,
) -> Query:
    """A game whose orders all end within ``steps``, in a kitchen with leftovers; from the held-out eighth of all games,
    or from the others. Raises ValueError for numbers that leave no order, or do not fit into a prompt."""
    if not 1 <= lifetime <= min(_MOST_LEFT, steps):
        raise ValueError(
            f"data.lifetime={lifetime}: a prompt has one digit for it, so that it is 1 to {_MOST_LEFT}, and at most "
            f"data.steps={steps}"
        )
    if min(intervals) < 1:
        raise ValueError(f"data.intervals={intervals}: an interval has at least 1 step")
    orders = 1 + (steps - lifetime) // interval
    for _ in range(_MOST_DRAWS):
        dishes = "".join(random.choices(DISHES, k=orders))
        hands = "".join(random.choices(NOTHING + DISHES, k=workers))
        in_pots = "".join(random.choices(NOTHING + COOKED, k=pots))
        text = f"{interval}:{dishes}|{hands}|{in_pots}"
        if (crc32(text.encode()) % 8 == 0) == held_out:
            break
    else:
        raise ValueError(
            f"data of workers={workers}, pots={pots} and an interval of {interval} make too few different games: none "
            f"of {_MOST_DRAWS} drawn ones is {'held out' if held_out else 'to train on'}"
        )
    places = ceil(lifetime / min(intervals))
    game = {"dishes": dishes, "interval": interval, "lifetime": lifetime, "hands": hands, "pots": in_pots}
    return Query(name, text, {**game, "places": places})


def _with(places: str, place: int, held: str) -> str:
    return places[:place] + held + places[place + 1 :]
