"""One policy learns Kuhn poker, as either player, by games with its past versions.

    J..=    the first player has the jack and passes or bets                  p
    Kp.=    the second player has the king, and its opponent has passed       b
    Jpb=    the first player again: it folds (p) or calls (b)                 p

Three cards, one each, an ante of 1 and bets of 1. A player's reward is what it wins, so that the rewards of both add
up to zero. Every answer but ``b`` is a pass. The SFT teaches to pass and to bet with the same probability; the KL to
this policy, and opponents from the whole past, keep self-play from going in circles. An evaluation reads the policy's
probabilities in all 12 situations from the log-probabilities of its answers, and computes from them exactly how much
the best opponents would win.
"""

from asyncio import gather
from collections.abc import Mapping, Sequence
from itertools import permutations, product
from math import exp
from random import Random

from flexmarl.actors.workflow import Agent, Agents, Query, Rewards

CARDS = "JQK"
DEALS = [*permutations(CARDS, 2)]
FIRST = [card + history for card in CARDS for history in ("", "pb")]
SECOND = [card + history for card in CARDS for history in ("p", "b")]
ENDS = ("pp", "bp", "bb", "pbp", "pbb")

Strategy = Mapping[str, float]
"""The probability of a bet in each situation: a card and the history of the game."""


async def workflow(query: Query, agents: Agents) -> Rewards:
    if query.data["measure"]:
        return await measure(agents)
    seats = (agents["player"], agents["rival"])
    if query.data["seat"] == "second":
        seats = (agents["rival"], agents["player"])
    history = ""
    while history not in ENDS:
        card = query.data["deal"][len(history) % 2]
        answer = await seats[len(history) % 2].generate(prompt(card + history))
        history += "b" if answer.text == "b" else "p"
    won = float(payoff(query.data["deal"], history))
    if query.data["seat"] == "second":
        won = -won
    return Rewards(player=won, rival=-won)


def prompt(situation: str) -> str:
    """All prompts have the same length, so that a small model reads card and history at the same places."""
    return f"{situation:.<3}="


async def measure(agents: Agents) -> Rewards:
    """The exploitability of the policy as both players, from its turns in all situations."""
    answers = await gather(*(bet_probability(agents["player"], situation) for situation in FIRST + SECOND))
    bets = dict(zip(FIRST + SECOND, (bet for bet, _ in answers), strict=True))
    metrics = {
        "exploitability": exploitability(bets),
        "first_wins": value(bets, bets),
        "illegal_answers": sum(not legal for _, legal in answers) / len(answers),
    }
    return Rewards(player=0.0, metrics=metrics)


async def bet_probability(agent: Agent, situation: str) -> tuple[float, bool]:
    """The probability of a bet, and False for an answer that was neither a bet nor a pass.

    A bet has its own log-probability. After a pass all other answers count as bets: they are, apart from illegal ones.
    """
    turn = await agent.generate(prompt(situation))
    probability = exp(turn.logprobs[0]) if turn.logprobs else 0.0
    return (probability if turn.text == "b" else 1 - probability), turn.text in ("p", "b")


def exploitability(strategy: Strategy) -> float:
    """The mean of what the best opponents of both players win, above the value of the game; 0 in an equilibrium.

    Half of the NashConv of Lanctot et al. 2017 (arXiv 1711.00832). An opponent has six situations with two answers
    each, and one of its 64 plans is a best response.
    """
    best_first = max(value(plan, strategy) for plan in plans(FIRST))
    best_second = max(-value(strategy, plan) for plan in plans(SECOND))
    return (best_first + best_second) / 2


def plans(situations: list[str]) -> list[Strategy]:
    return [dict(zip(situations, plan, strict=True)) for plan in product((0.0, 1.0), repeat=len(situations))]


def value(first: Strategy, second: Strategy) -> float:
    """The expected win of the first player."""
    return sum(
        payoff(deal, end) * probability(deal, end, (first, second)) for deal in DEALS for end in ENDS
    ) / len(DEALS)


def probability(deal: tuple[str, ...], end: str, strategies: tuple[Strategy, Strategy]) -> float:
    """The probability that a deal ends with a history."""
    result = 1.0
    for turn, action in enumerate(end):
        bet = strategies[turn % 2][deal[turn % 2] + end[:turn]]
        result *= bet if action == "b" else 1 - bet
    return result


def payoff(deal: tuple[str, ...], history: str) -> int:
    """The win of the first player."""
    if history.endswith("bp"):  # the player who has not folded wins the ante
        return 1 if len(history) % 2 == 0 else -1
    stake = 2 if history.endswith("bb") else 1
    return stake if CARDS.index(deal[0]) > CARDS.index(deal[1]) else -stake


def present_and_past(members: Sequence[object]) -> list[float]:
    """Half of the draws are the newest member, the others any of the earlier ones."""
    earlier = len(members) - 1
    return [1.0] * earlier + [max(earlier, 1.0)]


def train_query(position: int, seed: int) -> Query:
    """Any 12 queries in turn are all deals, with the policy in either seat: less is left to chance in a step."""
    games = [*product(DEALS, ("first", "second"))]
    Random(f"{seed} train {position // len(games)}").shuffle(games)
    deal, seat = games[position % len(games)]
    return Query(f"q{position:06}", f"{''.join(deal)} {seat}", {"deal": deal, "seat": seat, "measure": False})


def eval_queries(seed: int) -> list[Query]:
    return [Query("measure", "all situations", {"measure": True})]


def sft(agent: str, batch: int, size: int, seed: int) -> list[tuple[str, str]]:
    random = Random(f"{seed} SFT {agent} {batch}")
    return [(prompt(random.choice(FIRST + SECOND)), random.choice("pb")) for _ in range(size)]
