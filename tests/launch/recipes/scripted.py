"""Agents that give the answers of a list."""

from collections.abc import Iterator
from typing import Any

from flexmarl.actors.workflow import Prompt, Turn

CALCULATOR = ({"function": {"name": "calculate"}},)


class Scripted:
    """Gives its answers in order, the last one again and again, and records its prompts."""

    def __init__(self, name: str, *answers: str, logprob: float = -0.5) -> None:
        self.name, self.prompts = name, list[Prompt]()
        self._answers, self._logprob = list(answers), logprob
        self._numbers: Iterator[int] = iter(range(1000))

    async def generate(self, prompt: Prompt, **options: Any) -> Turn:
        self.prompts.append(prompt)
        text = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return Turn(
            self.name, text, (), (), sample_id=f"{self.name}-{next(self._numbers)}", logprobs=(self._logprob,),
            tools=CALCULATOR,
        )  # fmt: skip
