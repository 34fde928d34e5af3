"""The tokens that simulated answers are drawn from."""

import math
import random

import pytest

from flexmarl.actors.inference.engines.alphabet import LETTERS, alphabet_of

from ...chat.chat_tokenizer import END, SPECIAL, VOCABULARY, chat_tokenizer


def test_letters_are_drawn_for_a_policy_without_a_model() -> None:
    drawn = bytes(LETTERS.draw(random.Random(0), 1000)).decode()
    assert set(drawn) <= set("abcdefghijklmnopqrstuvwxyz .,;:!") and len(set(drawn)) == 32
    assert LETTERS.logprob == -math.log(32)


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 20])
def test_a_tokenizers_own_tokens_are_drawn_but_the_special_ones_and_those_that_its_model_lacks(
    vocabulary: int,
) -> None:
    alphabet = alphabet_of(chat_tokenizer(), vocabulary)
    assert set(alphabet.draw(random.Random(0), 10_000)) == set(range(len(SPECIAL), vocabulary))
    assert alphabet.end == END and alphabet.vocabulary == vocabulary
    assert alphabet.logprob == -math.log(vocabulary - len(SPECIAL))
