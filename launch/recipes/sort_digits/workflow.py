"""Two agents learn to sort digits: the sorter drafts an answer, the checker sees the draft and has the last word.

    31542=          the sorter answers   12354    (wrong, half of its reward is gone)
    31542?12354=    the checker answers  12345    (right: the checker's reward and the sorter's other half)

The digits of a problem are all different. Both agents start from random weights; the SFT teaches them the form of an
answer (the problem's digits in *any* order), and reinforcement learning teaches them to sort.
"""

from collections.abc import Sequence
from functools import cache
from itertools import permutations
from random import Random

from flexmarl.actors.workflow import Agents, Query, Rewards


async def workflow(query: Query, agents: Agents) -> Rewards:
    draft = await agents["sorter"].generate(f"{query.text}=")
    final = await agents["checker"].generate(f"{query.text}?{draft.text}=")

    drafted = float(draft.text == query.data["answer"])
    solved = float(final.text == query.data["answer"])
    return Rewards(
        sorter=0.5 * drafted + 0.5 * solved,
        checker=solved,
        metrics={"accuracy": solved, "draft_accuracy": drafted},
    )


def train_query(position: int, seed: int, *, digits: int, eval_problems: int) -> Query:
    """A function of position and seed alone, so that a resumed run continues with the same queries."""
    training, _ = _problems(seed, digits, eval_problems)
    return _query(f"q{position:06}", Random(f"{seed} train {position}").choice(training))


def eval_queries(seed: int, *, digits: int, eval_problems: int) -> list[Query]:
    """Problems that neither ``train_query`` nor ``sft`` ever uses."""
    _, evaluation = _problems(seed, digits, eval_problems)
    return [_query(f"e{number:06}", text) for number, text in enumerate(evaluation)]


def sft(
    agent: str, batch: int, size: int, seed: int, *, digits: int, eval_problems: int
) -> list[tuple[str, str]]:
    """Prompts and completions of one supervised batch. Drafts and completions are the digits in a random order."""
    training, _ = _problems(seed, digits, eval_problems)
    random = Random(f"{seed} SFT {agent} {batch}")
    texts = random.choices(training, k=size)
    if agent == "sorter":
        return [(f"{text}=", _shuffle(text, random)) for text in texts]
    return [(f"{text}?{_shuffle(text, random)}=", _shuffle(text, random)) for text in texts]


@cache
def _problems(seed: int, digits: int, eval_problems: int) -> tuple[Sequence[str], Sequence[str]]:
    """All problems, split into those to train on and ``eval_problems`` held out."""
    problems = ["".join(choice) for choice in permutations("0123456789", digits)]
    if len(problems) <= eval_problems:
        raise ValueError(
            f"data.digits={digits} makes {len(problems)} problems: none is left to train on when "
            f"data.eval_problems={eval_problems} are held out"
        )
    Random(f"{seed} problems").shuffle(problems)
    return problems[eval_problems:], problems[:eval_problems]


def _query(name: str, text: str) -> Query:
    return Query(name, text, {"answer": "".join(sorted(text))})


def _shuffle(text: str, random: Random) -> str:
    return "".join(random.sample(text, len(text)))
