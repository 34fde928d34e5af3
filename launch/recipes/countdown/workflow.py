"""Proposers and a judge with one policy: two of four numbers are to be added so that the sum is a target.

    3528=7                          each of four proposers, in parallel, answers a draft     5+2
    5+2,3+5,2+5,2+8?3528=7          the judge sees the drafts and has the last word          5+2

A draft's reward is its own, 1 if it is right, and the judge's is that of its answer. The judge sees no values: it must
check the drafts, or find a sum itself. The weights know the role by the form of the prompt. The SFT teaches the form of
an answer, and shows right sums among those of any two numbers; reinforcement learning teaches the rest.
"""

from asyncio import gather
from itertools import permutations
from random import Random
from zlib import crc32

from flexmarl.actors.workflow import Agents, Query, Rewards


async def workflow(query: Query, agents: Agents) -> Rewards:
    drafts = await gather(*(agents["proposer"].generate(query.text) for _ in range(query.data["drafts"])))
    answer = await agents["judge"].generate(shown([draft.text for draft in drafts], query.text))

    right = [is_right(draft.text, query.text) for draft in drafts]
    solved = is_right(answer.text, query.text)
    singles = {f"draft_{number}": float(each) for number, each in enumerate(right, 1)}
    metrics = {
        "accuracy": float(solved),
        "draft_accuracy": sum(right) / len(right),
        "any_draft": float(any(right)),
    }
    rewards = Rewards(judge=float(solved), metrics={**metrics, **singles})
    for draft, reward in zip(drafts, right, strict=True):
        rewards.of(draft, float(reward))
    return rewards


def shown(drafts: list[str], problem: str) -> str:
    """The judge's prompt. It ends as a proposer's does, so that it knows from the start what proposers have learned."""
    return f"{','.join(drafts)}?{problem}"


def is_right(answer: str, problem: str) -> bool:
    return answer in right_answers(problem)


def right_answers(problem: str) -> list[str]:
    """``3528=7``: 5+2 and 2+5."""
    numbers, target = problem.split("=")
    return [f"{a}+{b}" for a, b in permutations(numbers, 2) if int(a) + int(b) == int(target)]


def train_query(position: int, seed: int, *, drafts: int, eval_problems: int) -> Query:
    text = draw(Random(f"{seed} train {position}"), held_out=False)
    return Query(f"q{position:06}", text, {"drafts": drafts})


def eval_queries(seed: int, *, drafts: int, eval_problems: int) -> list[Query]:
    """Numbers with targets that neither ``train_query`` nor ``sft`` ever uses, in any order."""
    random = Random(f"{seed} evaluation")
    texts = [draw(random, held_out=True) for _ in range(eval_problems)]
    return [Query(f"e{number:06}", text, {"drafts": drafts}) for number, text in enumerate(texts)]


def sft(
    agent: str, batch: int, size: int, seed: int, *, drafts: int, eval_problems: int
) -> list[tuple[str, str]]:
    random = Random(f"{seed} SFT {agent} {batch}")
    examples = []
    for _ in range(size):
        problem = draw(random, held_out=False)
        prompt = problem
        if agent == "judge":
            prompt = shown([example(problem, random) for _ in range(drafts)], problem)
        examples.append((prompt, example(problem, random)))
    return examples


def example(problem: str, random: Random) -> str:
    """A right answer, or the sum of any two of the numbers."""
    if random.random() < 0.7:
        return random.choice(right_answers(problem))
    a, b = random.sample(problem.split("=")[0], 2)
    return f"{a}+{b}"


def draw(random: Random, held_out: bool) -> str:
    """A problem from the held-out eighth of all, or from the others."""
    while True:
        numbers = random.sample(range(1, 10), 4)
        problem = f"{''.join(map(str, numbers))}={sum(random.sample(numbers, 2))}"
        name = f"{sorted(numbers)} {problem.split('=')[1]}"
        if (crc32(name.encode()) % 8 == 0) == held_out:
            return problem
