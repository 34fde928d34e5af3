"""Each trajectory is a program: a coding harness, ``harness.py``, that repairs a file of failing tests with a fixer and
a reviewer.

The SFT teaches both to write: the fixer the numbers of the test and any operator, the reviewer verdicts of which many
are wrong. Reinforcement learning teaches which ones are right.
"""

import json
import sys
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

from flexmarl.actors import open_gateway
from flexmarl.actors.workflow import Agents, Query, Rewards

HARNESS = Path(__file__).with_name("harness.py")
SIGNS = "+-*"
MISTAKES = 0.3
"""Share of the verdicts that are wrong in the SFT of the reviewer."""


async def workflow(query: Query, agents: Agents) -> Rewards:
    # -I: an interpreter without the user's packages and variables starts faster.
    command = [sys.executable, "-I", str(HARNESS), query.data["client"], json.dumps(query.data["tests"])]
    async with open_gateway(agents) as gateway:
        end = await gateway.run(command, timeout_s=60)
    return gateway.rewards(end)


def train_query(position: int, seed: int, *, tests: int, client: str, **data: Any) -> Query:
    random = Random(f"{seed} train {position}")
    return _query(f"q{position:06}", [draw(random, held_out=False) for _ in range(tests)], client)


def eval_queries(seed: int, *, tests: int, client: str, eval_files: int) -> list[Query]:
    """Files whose tests neither ``train_query`` nor ``sft`` ever uses."""
    random = Random(f"{seed} evaluation")
    files = ([draw(random, held_out=True) for _ in range(tests)] for _ in range(eval_files))
    return [_query(f"e{number:06}", file, client) for number, file in enumerate(files)]


def sft(agent: str, batch: int, size: int, seed: int, **data: Any) -> list[tuple[str, str]]:
    random = Random(f"{seed} SFT {agent} {batch}")
    examples = []
    for _ in range(size):
        test = draw(random, held_out=False)
        failing, _, target = test.partition("!")
        sign = next(sign for sign in SIGNS if sign in failing)
        a, b = failing.split(sign)
        first, second = (f"{a}{random.choice(SIGNS)}{b}" for _ in range(2))
        if agent == "reviewer":
            result = random.choice([target, str(_value(a, random.choice(SIGNS), b)), "no"])
            right, wrong = ("ok", "no") if result == target else ("no", "ok")
            verdict = wrong if random.random() < MISTAKES else right
            examples.append((f"<user>{result}!{target}<eos><assistant>", verdict))
        elif random.random() < 0.5:
            examples.append((f"<user>{test}<eos><assistant>", first))
        else:
            result = str(_value(a, random.choice(SIGNS), b))
            prompt = f"<user>{test}<eos><assistant>{first}<eos><user>{result}<eos><assistant>"
            examples.append((prompt, second))
    return examples


def draw(random: Random, held_out: bool) -> str:
    """A failing test from the held-out eighth of all, or from the others: ``37+4!148``."""
    while True:
        a, b = f"{random.randrange(20, 100)}", f"{random.randrange(3, 10)}"
        wrong, right = random.sample(SIGNS, 2)
        test = f"{a}{wrong}{b}!{_value(a, right, b)}"
        if (crc32(test.encode()) % 8 == 0) == held_out:
            return test


def _value(a: str, sign: str, b: str) -> int:
    return {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]


def _query(name: str, tests: list[str], client: str) -> Query:
    return Query(name, " ".join(tests), {"tests": tests, "client": client})
