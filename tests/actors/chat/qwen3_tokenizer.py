"""A small tokenizer with the special tokens and the chat template of Qwen3 (Apache-2): bytes, some of them merged."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
MERGES = (("a", "d"), ("ad", "d"), ("\u010a", "\u010a"), ("u", "s"), ("e", "r"), ("us", "er"))
NAME = "Qwen/Qwen3-0.6B"

TEMPLATE = (Path(__file__).parent / "qwen3.jinja").read_text()


def qwen3_tokenizer(name: str = NAME) -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *("".join(pair) for pair in MERGES)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [*MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    # As Qwen3 has them: tokens of their own, which a decoded text keeps.
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    fast: Any = PreTrainedTokenizerFast  # untyped
    whole = fast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    whole.chat_template = TEMPLATE
    whole.name_or_path = name
    return whole
