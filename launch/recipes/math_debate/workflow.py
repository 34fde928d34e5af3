"""Debaters solve a word problem, read each other's solutions and answer again; a judge gives the final answer.

    round 1   each debater          the question                        -> a solution that ends with  #### 42
    round 2   each debater          what the others have written        -> the solution again, or a better one
    end       the judge             the question and the last solutions -> the final answer

Questions and answers are those of a data set in the format of GSM8K (Cobbe et al. 2021, arXiv 2110.14168): a
``question``, and an ``answer`` that ends with ``#### 42``. The reward of a right
solution is 1, and so is the judge's.
"""

import asyncio
import json
import re
from collections.abc import Sequence
from decimal import Decimal
from functools import cache
from pathlib import Path
from random import Random

from flexmarl.actors.errors import RecipeError
from flexmarl.actors.workflow import Agents, Query, Rewards, Turn

FORM = "Reason step by step. Write the final number in the last line, as: #### number"
REVISE = (
    "Other solutions of the same problem:\n\n{solutions}\n\nFind the mistakes in all of them and in yours. "
    + FORM
)
JUDGE = "{question}\n\nSeveral people have answered:\n\n{solutions}\n\nDecide which answer is right. " + FORM


async def workflow(query: Query, agents: Agents) -> Rewards:
    debater, judge = agents["debater"], agents["judge"]
    right = query.data["answer"]
    question = user(f"{query.text}\n\n{FORM}")
    debate = [await asyncio.gather(*(debater.generate([question]) for _ in range(query.data["debaters"])))]
    for _ in range(1, query.data["rounds"]):
        before = debate[-1]
        prompts = [
            REVISE.format(solutions=format_solutions([*before[:n], *before[n + 1 :]]))
            for n in range(len(before))
        ]
        debate.append(
            await asyncio.gather(
                *(debater.generate([turn, user(text)]) for turn, text in zip(before, prompts, strict=True))
            )
        )
    verdict = await judge.generate(
        [user(JUDGE.format(question=query.text, solutions=format_solutions(debate[-1])))]
    )

    final = is_right(verdict, right)
    rewards = Rewards(judge=final)
    for turn in (turn for solutions in debate for turn in solutions):
        rewards.of(turn, is_right(turn, right))
    rewards.metrics = {
        "accuracy": final,
        "first_accuracy": mean([is_right(turn, right) for turn in debate[0]]),
        "last_accuracy": mean([is_right(turn, right) for turn in debate[-1]]),
        "numbers": mean([float(number(turn.text) is not None) for turn in [*debate[-1], verdict]]),
    }
    return rewards


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def format_solutions(solutions: Sequence[Turn]) -> str:
    return "\n\n".join(f"Solution {n}:\n{turn.text.strip()}" for n, turn in enumerate(solutions, 1))


def number(text: str) -> Decimal | None:
    """The number behind the last ``####``, or without one the last number of a text; None if it has none."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text.rpartition("####")[2])
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def is_right(turn: Turn, answer: str) -> float:
    return float(number(turn.text) == Decimal(answer))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def train_query(position: int, seed: int, *, dataset: str, subset: str | None, **data: int) -> Query:
    """The questions in a shuffled order, all of them before any comes again."""
    problems = questions(dataset, subset, "train")
    epoch, place = divmod(position, len(problems))
    order = draw_order(len(problems), f"{seed} train {epoch}")
    return query(f"q{position:06}", problems[order[place]], **data)


def eval_queries(
    seed: int, *, dataset: str, subset: str | None, eval_problems: int, **data: int
) -> list[Query]:
    """``eval_problems`` questions of the test set, or all if it has fewer."""
    problems = questions(dataset, subset, "test")
    order = draw_order(len(problems), f"{seed} evaluation")[:eval_problems]
    return [query(f"e{place:06}", problems[place], **data) for place in sorted(order)]


@cache
def draw_order(count: int, seed: str) -> list[int]:
    return Random(seed).sample(range(count), count)


def query(
    name: str, problem: tuple[str, str], *, debaters: int, rounds: int, eval_problems: int = 0
) -> Query:
    question, answer = problem
    return Query(name, question, {"answer": answer, "debaters": debaters, "rounds": rounds})


@cache
def questions(dataset: str, subset: str | None, split: str) -> list[tuple[str, str]]:
    """Question and final number of each row of ``train`` or ``test``.

    ``dataset``: a folder with ``train.jsonl`` and ``test.jsonl``, relative to the recipe's folder or the working
    directory; or a name on the Hugging Face hub, for which the package ``datasets`` is needed. Raises RecipeError if it
    is not there, is empty, or has a row without a question or a number.
    """
    folders = [Path(__file__).parent / dataset, Path(dataset)]
    files = [folder / f"{split}.jsonl" for folder in folders if (folder / f"{split}.jsonl").is_file()]
    rows = read_lines(files[0]) if files else from_hub(dataset, subset, split)
    problems = []
    for place, row in enumerate(rows):
        question, answer = str(row.get("question", "")), number(str(row.get("answer", "")))
        if not question or answer is None:
            raise RecipeError(
                f"data.dataset={dataset}: row {place} of {split} has no question or no number as answer"
            )
        problems.append((question, str(answer)))
    if not problems:
        raise RecipeError(f"data.dataset={dataset}: {split} has no rows")
    return problems


def read_lines(file: Path) -> list[dict[str, object]]:
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def from_hub(name: str, subset: str | None, split: str) -> list[dict[str, object]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise RecipeError(
            f"data.dataset={name}: there is no {split}.jsonl in such a folder, and a data set of the hub needs the "
            "package datasets: pip install 'flexmarl[datasets]'"
        ) from None
    return [dict(row) for row in load_dataset(name, subset, split=split)]
