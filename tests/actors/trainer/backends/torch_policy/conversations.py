"""Samples of trajectories whose prompts extend the turns before them, and the way to compute each as a row of its
own."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from unittest import mock

from flexmarl.actors.messages import Sample, Truncation
from flexmarl.actors.trainer.padding import TokenRows


def make_conversations(seed: int, turns: int = 4, version: int = 0, vocabulary: int = 16) -> list[Sample]:
    """Three groups of three trajectories. In the second of each, the third turn is another continuation of the first
    one; in the last, another history comes before the third turn. Some turns have no advantage."""
    rng = random.Random(seed)

    def draw(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocabulary) for _ in range(rng.randint(1, most)))

    samples: list[Sample] = []
    for group, trajectory in product(range(3), range(3)):
        reward, history = rng.choice((0.0, 0.5, 1.0)), [draw(4)]
        for turn in range(turns):
            prompt, tokens = history[-1], draw(4)
            if turn == 2 and trajectory == 1:
                prompt = history[1] + draw(2)
            if turn == 2 and trajectory == 2:
                prompt = draw(6)
            history.append(prompt + tokens + draw(3))
            samples.append(
                Sample(
                    f"1:q{group}_{turn}_{trajectory}", "solver", version, version, f"1:q{group}", reward,
                    rng.choice((-1.0, 0.5, 1.0, 0.0)), prompt, tokens, tuple(rng.uniform(-3, -2) for _ in tokens),
                    group_size=3, query_position=group, temperature=0.6 + 0.2 * trajectory,
                    truncation=Truncation(top_k=9) if turn == 1 else None,
                )
            )  # fmt: skip
    return samples


@contextmanager
def each_sample_a_row() -> Iterator[None]:
    """Within it no samples are merged."""

    def alone(rows: TokenRows) -> tuple[TokenRows, list[list[int]]]:
        return rows, [[number] for number in range(len(rows.lengths))]

    with mock.patch.object(TokenRows, "merged", alone):
        yield
