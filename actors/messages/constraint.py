"""The form that an answer must have, as a turn asks for it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constraint:
    """The answer is JSON of ``schema`` (JSON Schema, as text: messages between processes take fewer objects than a
    schema may have), or one call of one of ``tools`` (names); either may be empty, and with both it is one of the two.

    The engine draws each token from those alone that leave such an answer possible. No trainer computes that
    distribution, so no turn with a constraint is trained."""

    schema: str = ""
    tools: tuple[str, ...] = ()
