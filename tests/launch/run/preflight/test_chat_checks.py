"""Checks of conversations before the start: the library's family, and templates that rewrite turns."""

from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.messages import ModelConfig
from flexmarl.launch.run.preflight.chat_checks import chat_problem, chat_warnings

from ....actors.chat.chat_tokenizer import CHATML, FORGETTING, chat_tokenizer
from ....actors.chat.qwen3_tokenizer import NAME, qwen3_tokenizer


def model(tokenizer: str, **options: Any) -> ModelConfig:
    return ModelConfig(config={"model_type": "qwen3"}, tokenizer=tokenizer, **options)


@pytest.mark.parametrize(
    ("source", "renderer", "template", "warning"),
    [
        ("small-chat", "auto", CHATML, ""),
        (
            "small-chat",
            "auto",
            FORGETTING,
            "rewrites answers with reasoning of earlier turns, and the library renderers has no family for the "
            "tokenizer small-chat: a conversation continues behind them only by generate(..., retokenize=True)",
        ),
        (NAME, "template", None, "rewrites answers with reasoning of earlier turns, and the library"),
        (NAME, "auto", None, "rewrites answers with reasoning of earlier turns. Here they stay as they were"),
        ("folder", "qwen3", None, "(renderers, family qwen3): an engine that takes the template"),
    ],
)
def test_a_template_that_rewrites_turns_is_said_with_its_cost(
    tmp_path: Path, source: str, renderer: str, template: str | None, warning: str
) -> None:
    tokenizer = qwen3_tokenizer(source) if template is None else chat_tokenizer(template)
    config = model(str(tmp_path) if source == "folder" else source, renderer=renderer)
    assert chat_problem(config, tokenizer) is None
    warnings = list(chat_warnings("solver", config, tokenizer, has_tools=True))
    rewriting = [text for text in warnings if "not recognised" not in text]
    assert len(rewriting) == bool(warning) and all(warning in text for text in rewriting)


def test_a_family_that_does_not_fit_is_a_problem() -> None:
    assert "as 'qwen9'" in str(chat_problem(model(NAME, renderer="qwen9"), qwen3_tokenizer()))
    assert "as 'qwen3'" in str(chat_problem(model("small-chat", renderer="qwen3"), chat_tokenizer()))
    wrong = model(NAME, template_options={"enable_thought": False})
    assert "enable_thought" in str(chat_problem(wrong, qwen3_tokenizer()))
    assert chat_problem(model(NAME, template_options={"enable_thinking": False}), qwen3_tokenizer()) is None
