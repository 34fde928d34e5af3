"""Agents that answer a program with texts of a list."""

import asyncio
from typing import Any

from flexmarl.actors.workflow import Prompt, Turn

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = 'I add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


class ScriptedAgent:
    """Gives its answers in order, or raises them, and records its prompts and options. Each character is a token, and
    each turn's prompt is the whole turn that it continues and the new messages' texts. ``held``: until it is set, no
    answer is given after its text has been shown. ``failure``: raised there in the place of an answer."""

    def __init__(self, name: str, *answers: str | Exception) -> None:
        self.name = name
        self.prompts: list[Any] = []
        self.options: list[dict[str, Any]] = []
        self.held: asyncio.Event | None = None
        self.failure: Exception | None = None
        self.cancelled = 0
        self._answers = list(answers)

    async def generate(self, prompt: Prompt, *, tools: Any = (), on_text: Any = None, **options: Any) -> Turn:
        parts = [prompt] if isinstance(prompt, str | Turn) else list(prompt)
        self.prompts.append(parts)
        self.options.append(options)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        number = len(self.prompts)
        try:
            for length in range(1, len(answer) + 1) if on_text else ():
                on_text(answer[:length])
                await asyncio.sleep(0)
            if self.held is not None:
                await self.held.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failure is not None:
            raise self.failure
        prompt_tokens: tuple[int, ...] = ()
        for part in parts:
            if isinstance(part, Turn):
                prompt_tokens += part.prompt_tokens + part.tokens
            else:
                prompt_tokens += tuple(map(ord, part if isinstance(part, str) else part["content"]))
        tokens = tuple(map(ord, answer))
        return Turn(
            self.name, answer, prompt_tokens, tokens, f"{self.name}-{number}", logprobs=(-0.5,) * len(tokens),
            tools=tuple(tools),
        )  # fmt: skip
