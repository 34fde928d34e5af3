"""Checks a model's conversations: the library and the chat template that make tokens of messages."""

from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from ....actors.chat.answer import foreign_form
from ....actors.chat.model_codec import model_codec
from ....actors.chat.renderer_codec import RendererCodec
from ....actors.chat.rewriting import rewritten_answers
from ....actors.chat.tokenizer_codec import TokenizerCodec
from ....actors.messages import ModelConfig

_REWRITES = (
    "policy {policy}: its chat template rewrites {answers} of earlier turns, and the library renderers has no family "
    "for the tokenizer {name}: a conversation continues behind them only by generate(..., retokenize=True), which "
    "tokenises its turns again, and for the trainer each is a sequence of its own. model.renderer names a family"
)
_KEEPS = (
    "policy {policy}: its chat template rewrites {answers} of earlier turns. Here they stay as they were generated "
    "(renderers, family {family}): an engine that takes the template after training reads other prompts"
)


def chat_problem(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The reason for which ``model.renderer`` can't be used with the tokenizer and the template's options."""
    try:
        model_codec(model, tokenizer).prepare()
    except ValueError as error:
        return str(error)
    return None


def chat_warnings(
    policy: str, model: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, has_tools: bool
) -> Iterator[str]:
    """To be called once ``chat_problem`` has none. ``has_tools``: the recipe has tools."""
    codec, end = model_codec(model, tokenizer), tokenizer.eos_token_id
    family = codec.family if isinstance(codec, RendererCodec) else None
    if has_tools and family is None and (reason := foreign_form(tokenizer)) is not None:
        yield f"policy {policy}: calls of tools in its answers are not recognised: {reason}"
    if answers := rewritten_answers(TokenizerCodec(tokenizer, model.template_options), end):
        if family is None:
            yield _REWRITES.format(policy=policy, answers=answers, name=codec.name)
        elif not rewritten_answers(codec, end):
            yield _KEEPS.format(policy=policy, answers=answers, family=family)
