"""A tester writes a test for a hidden program, and a coder drafts the program three times.

    443>514;?           the tester sees a first test, and writes the next input          010
    010>241;443>514;=   the coder sees both, the newest first, and writes a program      2m1

A program has a piece for each digit of its input: ``0`` to ``3`` add so much, ``d`` doubles, ``m`` is 5 minus the
digit. Inputs have digits below 5, and no result is above 5. So a test with large digits is passed by many programs, and
no single input tells all of them apart: the first one is drawn by chance, and the best next one depends on it. The SFT
teaches the tester to write inputs, with large digits more often than small ones, and the coder to write a program that
passes one of the two tests. Reinforcement learning teaches the tester which inputs leave few programs, and the coder to
write one that passes both.
"""

from asyncio import gather
from collections.abc import Iterable
from itertools import product
from math import prod
from random import Random
from zlib import crc32

from flexmarl.actors.workflow import Agents, Query, Rewards

LARGEST = 5
DIGITS = "01234"
PIECES = "0123dm"
LENGTH = 3
PROGRAMS = ["".join(pieces) for pieces in product(PIECES, repeat=LENGTH)]


async def workflow(query: Query, agents: Agents) -> Rewards:
    program, inputs = query.data["program"], [query.data["input"]]
    test = await agents["tester"].generate(f"{format_tests(program, inputs)}?")
    if is_input(test.text):
        inputs.append(test.text)
    prompt = f"{format_tests(program, inputs)}="
    drafts = await gather(*(agents["coder"].generate(prompt) for _ in range(query.data["drafts"])))

    possible = programs_left(program, inputs)
    chosen = next((draft for draft in drafts if passes(draft.text, program, inputs)), drafts[0])
    rewards = Rewards(tester=1 / possible)
    for draft in drafts:
        rewards.of(draft, pass_share(draft.text, program))
    rewards.metrics = {
        "accuracy": float(chosen.text == program),
        "draft_accuracy": sum(draft.text == program for draft in drafts) / len(drafts),
        "programs_left": possible,
        "invalid_tests": float(len(inputs) == 1),
    }
    return rewards


def is_input(text: str) -> bool:
    return len(text) == LENGTH and all(digit in DIGITS for digit in text)


def is_program(text: str) -> bool:
    return len(text) == LENGTH and all(piece in PIECES for piece in text)


def output(program: str, digits: str) -> str:
    return "".join(map(result, program, digits))


def result(piece: str, digit: str) -> str:
    number = int(digit)
    output_digit = 2 * number if piece == "d" else LARGEST - number if piece == "m" else number + int(piece)
    return str(min(output_digit, LARGEST))


def format_tests(program: str, inputs: list[str]) -> str:
    """The tests: each input with the hidden program's output, the newest first."""
    return "".join(f"{digits}>{output(program, digits)};" for digits in reversed(inputs))


def passes(text: str, program: str, inputs: list[str]) -> bool:
    """True for a program that has the hidden program's outputs."""
    return is_program(text) and all(output(text, digits) == output(program, digits) for digits in inputs)


def programs_left(program: str, inputs: list[str]) -> int:
    """The number of programs that pass the tests, the hidden one among them."""
    return prod(len(passing(piece, digits)) for piece, *digits in zip(program, *inputs, strict=True))


def passing(piece: str, digits: Iterable[str]) -> list[str]:
    """The pieces with the same results."""
    return [other for other in PIECES if agree(other, piece, digits)]


def agree(piece: str, other: str, digits: Iterable[str]) -> bool:
    return all(result(piece, digit) == result(other, digit) for digit in digits)


def pass_share(text: str, program: str) -> float:
    """The share of a draft's output digits that are right for all inputs; 0 for a text that is not a program."""
    if not is_program(text):
        return 0.0
    return sum(agree(piece, other, DIGITS) for piece, other in zip(text, program, strict=True)) / LENGTH


def train_query(position: int, seed: int, *, drafts: int, **data: int) -> Query:
    return draw(f"q{position:06}", Random(f"{seed} train {position}"), drafts, held_out=False)


def eval_queries(seed: int, *, drafts: int, eval_problems: int) -> list[Query]:
    """Pairs of a hidden program and a first input that ``train_query`` never returns."""
    random = Random(f"{seed} evaluation")
    return [draw(f"e{number:06}", random, drafts, held_out=True) for number in range(eval_problems)]


def sft(agent: str, batch: int, size: int, seed: int, **data: int) -> list[tuple[str, str]]:
    """Inputs of the tester, more often with large digits; programs of the coder that pass one of two tests."""
    random = Random(f"{seed} SFT {agent} {batch}")
    examples = []
    for _ in range(size):
        program, inputs = random.choice(PROGRAMS), [any_input(random), any_input(random)]
        if agent == "tester":
            large = "".join(random.choices(DIGITS, weights=range(1, len(DIGITS) + 1), k=LENGTH))
            examples.append((f"{format_tests(program, inputs[:1])}?", large))
        else:
            pieces = [
                random.choice(passing(*pair)) for pair in zip(program, random.choice(inputs), strict=True)
            ]
            examples.append((f"{format_tests(program, inputs)}=", "".join(pieces)))
    return examples


def draw(name: str, random: Random, drafts: int, *, held_out: bool) -> Query:
    """A hidden program and a first input, of the held-out eighth of all such pairs or of the others."""
    while True:
        program, digits = random.choice(PROGRAMS), any_input(random)
        text = f"{program} {digits}"
        if (crc32(text.encode()) % 8 == 0) == held_out:
            return Query(name, text, {"program": program, "input": digits, "drafts": drafts})


def any_input(random: Random) -> str:
    return "".join(random.choices(DIGITS, k=LENGTH))
