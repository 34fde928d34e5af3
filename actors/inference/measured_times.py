"""Times of an engine from measured tables. Pure; ``launch/simulate/measured_tables.py`` fills them."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from ..config_base import Config, Count, NonNegative, Unit
from .engine_times import EngineTimes

Ascending = Annotated[tuple[Count, ...], Field(min_length=2)]
Seconds = Annotated[tuple[NonNegative, ...], Field(min_length=2)]


class MeasuredTimes(Config, EngineTimes):
    """Tables of an engine on its devices, in seconds. Between their entries times are linear; beyond the last one they
    grow in proportion to the work, and below the first they are the first one's. No entry is less than one before it:
    where measurements fall with more work, they are as they were with less."""

    step_s: Annotated[NonNegative, Unit("s")]
    """A step beside the computations of the device."""
    batches: Annotated[Ascending, Unit("sequences")]
    """Sequences of a decode step: the rows of `decode`."""
    contexts: Annotated[Ascending, Unit("tokens")]
    """Tokens in the context of each of them: the columns."""
    decode: tuple[Seconds, ...]
    """Computations of a decode step."""
    prompt_tokens: Annotated[Ascending, Unit("tokens")]
    """Tokens of prompts in a step, and of one prompt: the entries of `products` and of `attention`."""
    products: Seconds
    """Computations of a step with so many tokens in short prompts."""
    attention: Seconds
    """Seconds that one prompt of so many tokens takes beyond short prompts with as many."""
    chunk_tokens: Annotated[Count, Unit("tokens")] = 8192
    """Most tokens of prompts in a step."""
    kv_tokens: Annotated[Count, Unit("tokens")]
    """Tokens whose keys and values fit into the memory."""

    @model_validator(mode="before")
    @classmethod
    def _never_falls(cls, values: Any) -> Any:
        """Also down the columns."""
        if not isinstance(values, dict) or not {"decode", "products", "attention"} <= values.keys():
            return values
        rows = [_rising(row) for row in values["decode"]]
        columns = [_rising(column) for column in zip(*rows, strict=True)]
        tables = {key: _rising(values[key]) for key in ("products", "attention")}
        return {**values, **tables, "decode": [*zip(*columns, strict=True)]}

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        shape = (len(self.decode), *map(len, self.decode))
        if shape != (len(self.batches), *[len(self.contexts)] * len(self.batches)):
            raise ValueError(
                f"decode has {len(self.decode)} rows of {sorted(set(map(len, self.decode)))} entries, for "
                f"{len(self.batches)} batches and {len(self.contexts)} contexts"
            )
        for key in ("products", "attention"):
            if len(getattr(self, key)) != len(self.prompt_tokens):
                raise ValueError(f"{key} has {len(getattr(self, key))} entries for {len(self.prompt_tokens)}")
        for key in ("batches", "contexts", "prompt_tokens"):
            if (steps := getattr(self, key)) != tuple(sorted(set(steps))):
                raise ValueError(f"{key} do not ascend: {steps}")
        return self

    def decode_s(self, batch: int, context: float) -> float:
        mean = context / batch
        return self.step_s + _value(
            self.batches, [_value(self.contexts, row, mean) for row in self.decode], batch
        )

    def prefill_s(self, prompts: Sequence[float], batch: int) -> float:
        # A step reads the weights once, for its prompts and its running sequences.
        reading_s = self.decode[0][0]
        chunks, last = divmod(sum(prompts), self.chunk_tokens)
        added_s = chunks * max(0.0, _value(self.prompt_tokens, self.products, self.chunk_tokens) - reading_s)
        if last:
            added_s += max(0.0, _value(self.prompt_tokens, self.products, last) - reading_s)
        return added_s + sum(_value(self.prompt_tokens, self.attention, prompt) for prompt in prompts)

    @property
    def room_tokens(self) -> int:
        return self.kv_tokens


def _rising(values: Sequence[float]) -> list[float]:
    rising: list[float] = []
    for value in values:
        rising.append(max(value, rising[-1]) if rising else value)
    return rising


def _value(steps: Sequence[int], values: Sequence[float], at: float) -> float:
    if at >= steps[-1]:
        return values[-1] * at / steps[-1]
    after = max(1, bisect_right(steps, at))
    before = after - 1
    part = max(0.0, (at - steps[before]) / (steps[after] - steps[before]))
    return values[before] + part * (values[after] - values[before])
