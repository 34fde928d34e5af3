"""tool-math: the calculator, the conversation and its rewards."""

import pytest

from flexmarl.actors.workflow import Query, Turn
from flexmarl.launch.recipes.tool_math.workflow import CALL, agreement, calculate, workflow

from .scripted import Scripted

QUERY = Query("q", "37 boxes of 4 nuts", {"expression": "37*4", "number": "148", "thing": "nuts"})


async def test_the_calculator_knows_three_operators() -> None:
    assert [await calculate(text) for text in ("37*4", "37+4", "37-4", "3-9")] == ["148", "41", "33", "-6"]
    for text in ("37", "37**4", "a+b", "__import__('os')", ""):
        with pytest.raises(ValueError, match=r"is not a\+b"):
            await calculate(text)


@pytest.mark.parametrize(
    ("call", "result", "answer", "reader", "writer", "accuracy"),
    [
        (CALL.format("37*4"), "148", "148 nuts", 1.0, 1.0, 1.0),
        (CALL.format("37*4"), "148", "148 figs", 0.5, 0.375, 0.0),
        (CALL.format("37+4"), "41", "41 nuts", 0.1875, 1.0, 0.0),
        ("148", "error", "148 nuts", 0.5, 0.0, 1.0),
        (CALL.format("37"), "error", "error nuts", 0.125, 1.0, 0.0),
    ],
)
async def test_rewards(
    call: str, result: str, answer: str, reader: float, writer: float, accuracy: float
) -> None:
    agents = {"reader": Scripted("reader", call), "writer": Scripted("writer", answer)}
    rewards = (await workflow(QUERY, agents)).checked()
    assert agents["reader"].prompts == [[{"role": "user", "content": QUERY.text}]]
    (prompt,) = agents["writer"].prompts
    assert isinstance(prompt, list) and isinstance(prompt[0], Turn) and prompt[0].text == call
    assert prompt[1] == {"role": "tool", "content": result}
    assert rewards.by_agent["reader"] == pytest.approx(reader)
    assert rewards.metrics["accuracy"] == accuracy
    if result != "error":
        assert rewards.by_agent["writer"] == pytest.approx(writer)


def test_agreement_is_whole_only_if_all_is_right() -> None:
    assert agreement("148 nuts", "148 nuts") == 1.0
    assert agreement("147 nuts", "148 nuts") == pytest.approx(0.375)
    assert agreement("1488 nuts", "148 nuts") == pytest.approx(0.5 * 3 / 5)
    assert agreement("", "148 nuts") == 0.0
