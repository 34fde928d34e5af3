"""Writes the recipe's ``tokenizer`` folder: one token per character, and an error for any other character.

python make_tokenizer.py [FOLDER]
"""

import sys
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SYMBOLS = [*"0123456789=?", "<eos>", "<pad>"]


def make_tokenizer() -> Any:
    vocabulary = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    # The unknown token is not in the vocabulary, so that other characters are an error.
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    wrap: Any = PreTrainedTokenizerFast  # it has no types
    return wrap(
        tokenizer_object=characters,
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "tokenizer"
    make_tokenizer().save_pretrained(folder)
