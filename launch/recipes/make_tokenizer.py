"""Writes a ``tokenizer`` folder with one token per symbol, and an error for any other character.

    python -m flexmarl.launch.recipes.make_tokenizer FOLDER "0123456789=?" [WORD ...]

The symbols are the characters of the first argument, and the words behind it; of two that fit, the longer one is
taken. ``chat_template.jinja`` in FOLDER, if there is one, becomes the tokenizer's chat template.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def make_tokenizer(symbols: Sequence[str], chat_template: str | None = None) -> Any:
    """``symbols`` have the ids 0, 1, 2 ...; ``<eos>`` and ``<pad>`` follow."""
    vocabulary = {symbol: number for number, symbol in enumerate([*symbols, "<eos>", "<pad>"])}
    # The unknown token is not in the vocabulary, so that other characters are an error.
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    longer = sorted((symbol for symbol in symbols if len(symbol) > 1), key=len, reverse=True)
    words.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join([*map(re.escape, longer), r"[\s\S]"])), "isolated"
    )
    words.decoder = decoders.Fuse()
    wrap: Any = PreTrainedTokenizerFast  # it has no types
    return wrap(
        tokenizer_object=words,
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **({} if chat_template is None else {"chat_template": chat_template}),
    )


def main(folder: str, characters: str, *more: str) -> None:
    template = Path(folder) / "chat_template.jinja"
    chat = template.read_text() if template.exists() else None
    make_tokenizer([*characters, *more], chat).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
