"""A reader turns a question into a call of a calculator, and a writer answers with its result, in one conversation.

    user       37 boxes of 4 nuts
    reader     <tool_call>{"name": "calculate", "arguments": {"expression": "37*4"}}</tool_call>
    tool       148
    writer     148 nuts

The messages go through the chat template of the recipe's tokenizer. The SFT teaches the form of a call and of an
answer: any operator, and the digits of the question or of the result in any order. Reinforcement learning teaches
which ones.
"""

import re
from random import Random
from zlib import crc32

from flexmarl.actors.workflow import Agents, Query, Rewards, ToolCall

THINGS = ("nuts", "pears", "plums", "figs")
STORIES = {"+": "{a} {thing} and {b}", "-": "{a} {thing} without {b}", "*": "{a} boxes of {b} {thing}"}
CALL = '<tool_call>{{"name": "calculate", "arguments": {{"expression": "{0}"}}}}</tool_call>'


async def calculate(expression: str) -> str:
    """The value of a+b, a-b or a*b, for whole numbers a and b."""
    parts = re.fullmatch(r"(\d+)([-+*])(\d+)", expression)
    if parts is None:
        raise ValueError(f"{expression} is not a+b, a-b or a*b")
    return str(value(int(parts[1]), parts[2], int(parts[3])))


async def workflow(query: Query, agents: Agents) -> Rewards:
    call = await agents["reader"].generate([{"role": "user", "content": query.text}], tools=[calculate])
    call_expression, result = await expression_and_result(call.tool_calls)
    answer = await agents["writer"].generate([call, {"role": "tool", "content": result}], tools=[calculate])

    expression, number, thing = query.data["expression"], query.data["number"], query.data["thing"]
    solved = float(answer.text == f"{number} {thing}")
    return Rewards(
        reader=0.5 * agreement(call_expression, expression) + 0.5 * solved,
        writer=agreement(answer.text, f"{result} {thing}"),
        metrics={"accuracy": solved, "call_accuracy": float(call_expression == expression)},
    )


async def expression_and_result(calls: tuple[ToolCall, ...]) -> tuple[str, str]:
    """The expression of the only call and its result, which is ``error`` if it fails; without a call, both are."""
    expression = str(calls[0].arguments.get("expression")) if len(calls) == 1 else "error"
    try:
        return expression, await calculate(expression)
    except ValueError:
        return expression, "error"


def agreement(text: str, right: str) -> float:
    """1 if a text is right, else at most 0.5: half the share of the pieces that are."""
    pieces, right_pieces = (re.findall(r"\d|[-+*]| [a-z]+", part) for part in (text, right))
    same = sum(piece == want for piece, want in zip(pieces, right_pieces, strict=False))
    return 1.0 if text == right else 0.5 * same / max(len(pieces), len(right_pieces))


def train_query(position: int, seed: int, **data: int) -> Query:
    return draw(f"q{position:06}", Random(f"{seed} train {position}"), held_out=False)


def eval_queries(seed: int, *, eval_problems: int) -> list[Query]:
    """Questions that neither ``train_query`` nor ``sft`` ever uses."""
    random = Random(f"{seed} evaluation")
    return [draw(f"e{number:06}", random, held_out=True) for number in range(eval_problems)]


def sft(agent: str, batch: int, size: int, seed: int, **data: int) -> list[tuple[str, str]]:
    random = Random(f"{seed} SFT {agent} {batch}")
    examples = []
    for number in range(size):
        query = draw(f"{number}", random, held_out=False)
        prompt = f"<user>{query.text}<eos><assistant>"
        a, b, c = random.sample(re.findall(r"\d", query.text), 3)
        call = CALL.format(f"{a}{b}{random.choice('-+*')}{c}")
        if agent == "writer":
            result = query.data["number"]
            prompt = f"{prompt}{call}<eos><tool>{result}<eos><assistant>"
            call = f"{''.join(random.sample(result, len(result)))} {query.data['thing']}"
        examples.append((prompt, call))
    return examples


def draw(name: str, random: Random, held_out: bool) -> Query:
    """A question from the held-out eighth of all, or from the others."""
    while True:
        a, b, thing = random.randrange(20, 100), random.randrange(3, 10), random.choice(THINGS)
        sign, story = random.choice([*STORIES.items()])
        text = story.format(a=a, b=b, thing=thing)
        if (crc32(text.encode()) % 8 == 0) == held_out:
            data = {"expression": f"{a}{sign}{b}", "number": str(value(a, sign, b)), "thing": thing}
            return Query(name, text, data)


def value(a: int, sign: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[sign]
