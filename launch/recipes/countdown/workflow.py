"""Proposers and a judge with one policy: two of four numbers are to be added so that the sum is a target.

    528=7  328=7  358=7  352=7      four proposers, in parallel, each see three numbers      5+2
    5+2,3+2,3+8,2+5?3528=7          the judge sees the drafts and has the last word          5+2

A draft's reward is its own, 1 if it is right, and the judge's is that of its answer. Only two proposers see both
numbers of a sum. The judge sees no values: it must check the drafts, or find a sum itself. The weights know the role by
the form of the prompt. The SFT teaches the form of an answer, and shows right sums among those of any two numbers;
reinforcement learning teaches the rest.
"""

from asyncio import gather
from itertools import permutations
from random import Random
from zlib import crc32

from flexmarl.actors.workflow import Agents, Query, Rewards


async def workflow(query: Query, agents: Agents) -> Rewards:
    drafts = await gather(*(agents["proposer"].generate(view) for view in views(query.text)))
    answer = await agents["judge"].generate(judge_prompt([draft.text for draft in drafts], query.text))

    right = [is_right(draft.text, query.text) for draft in drafts]
    solved = is_right(answer.text, query.text)
    singles = {f"draft_{number}": float(is_solved) for number, is_solved in enumerate(right, 1)}
    metrics = {
        "accuracy": float(solved),
        "draft_accuracy": sum(right) / len(right),
        "any_draft": float(any(right)),
    }
    rewards = Rewards(judge=float(solved), metrics={**metrics, **singles})
    for draft, reward in zip(drafts, right, strict=True):
        rewards.of(draft, float(reward))
    return rewards


def views(problem: str) -> list[str]:
    """``3528=7``: what the four proposers see, each without one of the numbers."""
    return [problem.replace(number, "", 1) for number in problem.split("=")[0]]


def judge_prompt(drafts: list[str], problem: str) -> str:
    """The judge's prompt. It ends as a proposer's does, so that it knows from the start what proposers have learned."""
    return f"{','.join(drafts)}?{problem}"


def is_right(answer: str, problem: str) -> bool:
    return answer in right_answers(problem)


def right_answers(problem: str) -> list[str]:
    """``3528=7``: 5+2 and 2+5. Fewer numbers may have no answer."""
    numbers, target = problem.split("=")
    return [f"{a}+{b}" for a, b in permutations(numbers, 2) if int(a) + int(b) == int(target)]


def train_query(position: int, seed: int, *, eval_problems: int) -> Query:
    text = draw(Random(f"{seed} train {position}"), held_out=False)
    return Query(f"q{position:06}", text)


def eval_queries(seed: int, *, eval_problems: int) -> list[Query]:
    """Numbers with targets that neither ``train_query`` nor ``sft`` ever uses, in any order."""
    random = Random(f"{seed} evaluation")
    texts = [draw(random, held_out=True) for _ in range(eval_problems)]
    return [Query(f"e{number:06}", text) for number, text in enumerate(texts)]


def sft(agent: str, batch: int, size: int, seed: int, *, eval_problems: int) -> list[tuple[str, str]]:
    random = Random(f"{seed} SFT {agent} {batch}")
    examples = []
    for _ in range(size):
        problem = draw(random, held_out=False)
        if agent == "judge":
            drafts = [example(view, random) for view in views(problem)]
            examples.append((judge_prompt(drafts, problem), example(problem, random)))
        else:
            seen = random.choice(views(problem))
            examples.append((seen, example(seen, random)))
    return examples


def example(problem: str, random: Random) -> str:
    """A right answer, if there is one, or the sum of any two of the numbers."""
    right = right_answers(problem)
    if right and random.random() < 0.7:
        return random.choice(right)
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
