"""The text codec of models that have a Hugging Face tokenizer."""

from functools import lru_cache

from transformers import PreTrainedTokenizerBase


class TokenizerCodec:
    """See ``TextCodec``."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = tokenizer.backend_tokenizer

        @lru_cache(maxsize=256)  # the trajectories of a group share their first prompt
        def encode(text: str, first: bool) -> tuple[int, ...]:
            return tuple(backend.encode(text, add_special_tokens=first).ids)

        self._encode = encode
        self._backend = backend

    def encode(self, text: str, first: bool) -> tuple[int, ...]:
        return self._encode(text, first)

    def decode(self, tokens: tuple[int, ...]) -> str:
        text: str = self._backend.decode(tokens, skip_special_tokens=True)
        return text
