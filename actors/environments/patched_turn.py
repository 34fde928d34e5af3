"""A turn in whose place an environment takes a recorded action. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..workflow import Message, Turn


@dataclass(frozen=True, slots=True)
class PatchedTurn(Turn):
    """A turn with the text of the recorded action, and without tokens: the policy has not drawn them. It names the
    sample of the turn that was drawn, which is trained with its own tokens."""


def patch_turn(turn: Turn, action: str) -> PatchedTurn:
    """Returns ``turn`` with the text ``action``."""
    values = {field.name: getattr(turn, field.name) for field in fields(Turn)}
    answer = {"role": "assistant", "content": action}
    conversation = (*turn.conversation[:-1], answer) if turn.conversation else ()
    changed: dict[str, Any] = {
        "text": action,
        "tokens": (),
        "logprobs": (),
        "finish_reason": "stop",
        "answer": None,
    }
    return PatchedTurn(**{**values, **changed, "conversation": conversation})


def as_written(parts: Sequence[str | Turn | Message]) -> list[str | Turn | Message]:
    """Returns a prompt with the text of each patched turn in its place, to be tokenised as other text: behind the
    tokens of the turn's own prompt, or as a message behind those of its conversation."""
    has_text = any(isinstance(part, str) for part in parts)
    written: list[str | Turn | Message] = []
    for number, part in enumerate(parts):
        if not isinstance(part, PatchedTurn):
            written.append(part)
        elif part.conversation and not has_text:
            written += part.conversation if number == 0 else part.conversation[-1:]
        else:
            written += [Turn(part.agent, "", part.prompt_tokens, ()), part.text]
    return written
