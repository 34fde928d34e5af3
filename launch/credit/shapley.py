"""Shapley values of agents. Pure.

The value of agent i among the agents N is the mean, over orders of N, of v(P + i) - v(P), where P are the agents before
i in the order, and v(S) is the worth of a coalition S (Shapley, "A value for n-person games", 1953). CapaBench (Yang et
al., arXiv 2502.00510, section 3) takes for v(S) the success of a team in which the agents outside S are played by a
default model. All orders give the exact values; drawn ones an estimate without bias (Castro et al., "Polynomial
calculation of the Shapley value based on sampling", 2009).
"""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

MOST_EXACT: Final = 6
"""The most agents whose orders are all taken: they have 64 coalitions."""

Agent = str
Coalition = frozenset[Agent]
Order = tuple[Agent, ...]
Worth = np.ndarray[Any, Any]


def orders_of(agents: Sequence[Agent], draws: int, seed: int = 0) -> list[Order]:
    """All orders of up to ``MOST_EXACT`` agents, or if there are no more than ``draws``; else ``draws`` different ones,
    by the seed."""
    if len(agents) <= MOST_EXACT or draws >= math.factorial(len(agents)):
        return [*itertools.permutations(agents)]
    chosen: dict[Order, None] = {}
    drawing = random.Random(seed)
    while len(chosen) < draws:
        order = tuple(drawing.sample(agents, len(agents)))
        # With each order its reverse: an agent that is early in one is late in the other, which halves the error.
        chosen |= {order: None, order[::-1]: None}
    return [*chosen][:draws]


def coalitions_of(orders: Sequence[Order]) -> list[Coalition]:
    """The coalitions whose worth is needed, the smallest first; among them are that of no agent and that of all."""
    coalitions = {frozenset(order[:size]): None for order in orders for size in range(len(order) + 1)}
    return sorted(coalitions, key=lambda coalition: (len(coalition), sorted(coalition)))


def shapley_values(orders: Sequence[Order], worth: Mapping[Coalition, Worth]) -> dict[Agent, Worth]:
    """The value of each agent. ``worth``: of each of ``coalitions_of(orders)``: one number, or an array with one for
    each query, as the values then have too. They add up to the worth of all agents less that of no agent."""
    values = dict.fromkeys(orders[0], np.zeros_like(worth[frozenset()], dtype=float))
    for order in orders:
        for place, agent in enumerate(order):
            before, after = frozenset(order[:place]), frozenset(order[: place + 1])
            values[agent] = values[agent] + (worth[after] - worth[before]) / len(orders)
    return values
