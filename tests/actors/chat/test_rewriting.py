"""Probes of conversations that a chat template rewrites."""

import pytest

from flexmarl.actors.chat.byte_codec import ByteCodec
from flexmarl.actors.chat.renderer_codec import RendererCodec
from flexmarl.actors.chat.rewriting import rewritten_answers
from flexmarl.actors.chat.text_codec import TextCodec
from flexmarl.actors.chat.tokenizer_codec import TokenizerCodec

from .chat_tokenizer import CHATML, END, FORGETTING, TRIMMING, chat_tokenizer
from .qwen3_tokenizer import qwen3_tokenizer

COUNTING = CHATML.replace("{{ message.content }}", "{{ message.content }}{{ messages | length }}")
QWEN3 = qwen3_tokenizer()


@pytest.mark.parametrize(
    ("codec", "answers"),
    [
        (ByteCodec("bytes"), ""),
        (TokenizerCodec(chat_tokenizer(CHATML)), ""),
        (TokenizerCodec(chat_tokenizer(TRIMMING)), ""),
        (TokenizerCodec(chat_tokenizer(None)), ""),
        (TokenizerCodec(chat_tokenizer(FORGETTING)), "answers with reasoning"),
        (TokenizerCodec(chat_tokenizer(COUNTING)), "answers"),
        (TokenizerCodec(QWEN3), "answers with reasoning"),
        (RendererCodec(QWEN3, "qwen3"), ""),
    ],
)
def test_a_template_that_rewrites_answers_is_found(codec: TextCodec, answers: str) -> None:
    assert rewritten_answers(codec, END) == answers
