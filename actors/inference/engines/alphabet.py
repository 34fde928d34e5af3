"""The tokens that simulated answers are drawn from."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...chat.byte_codec import END_OF_SEQUENCE

_LETTERS: Final = b"abcdefghijklmnopqrstuvwxyz .,;:!"
_TO_LETTERS: Final = bytes(_LETTERS[byte % len(_LETTERS)] for byte in range(256))


@dataclass(frozen=True, slots=True)
class Alphabet:
    """``draw``: that many tokens, one like the other. ``logprob``: of each. ``end``: ends an answer. ``vocabulary``:
    tokens of a prompt are below it."""

    draw: Callable[[random.Random, int], Sequence[int]]
    logprob: float
    end: int
    vocabulary: int


LETTERS: Final = Alphabet(
    lambda numbers, count: numbers.randbytes(count).translate(_TO_LETTERS),
    -math.log(len(_LETTERS)),
    END_OF_SEQUENCE,
    vocabulary=256,  # tokens are bytes of UTF-8 text
)


def alphabet_of(tokenizer: Any, vocabulary: int) -> Alphabet:
    """The tokens of a tokenizer (of transformers) below ``vocabulary``, its model's, without the special ones."""
    special = set(tokenizer.all_special_ids)
    tokens = [
        token for token in tokenizer.get_vocab().values() if token < vocabulary and token not in special
    ]
    end = tokenizer.eos_token_id
    return Alphabet(
        lambda numbers, count: numbers.choices(tokens, k=count),
        -math.log(len(tokens)),
        tokens[0] if end is None else end,
        vocabulary,
    )
