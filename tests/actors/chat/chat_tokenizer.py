"""A small tokenizer with a chat template: one token for each character, and special ones around messages."""

import string
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")
CHARACTERS = string.printable
VOCABULARY = len(SPECIAL) + len(CHARACTERS)
END = SPECIAL.index("<|im_end|>")

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = CHATML.replace("message.content", "message.content | trim")
# As Qwen3's: the reasoning of answers before the last question is left out.
FORGETTING = CHATML.replace(
    "{{ message.content }}",
    "{{ message.content.split('</think>')[-1] if message.role == 'assistant' else message.content }}",
)
CALLS = CHATML.replace(
    "{{ message.content }}",
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>\n"
    "{{ call.function | tojson }}\n</tool_call>{% endfor %}",
)
WITHOUT_TOOL_RESULTS = CHATML.replace(
    "{% for message in messages %}", "{% for message in messages if message.role != 'tool' %}"
)
FAILING = CHATML + "{{ raise_exception('no system role') if messages[0].role == 'system' }}"


def chat_tokenizer(template: str | None = CHATML) -> Any:
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast  # untyped
    made = fast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=[AddedToken("<|im_start|>", special=True)],
    )
    made.chat_template = template
    made.name_or_path = "small-chat"
    return made
