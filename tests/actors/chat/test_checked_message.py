"""Messages that no chat template could take."""

from typing import Any

import pytest

from flexmarl.actors.chat.checked_message import checked_message


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"content": "x"}, r"messages\[3\] has no role: {'content': 'x'}"),
        ({"role": "", "content": "x"}, r"messages\[3\] has no role"),
        ({"role": "user", "content": "x", "contents": 1}, r"messages\[3\] has the unknown key 'contents'"),
        ({"role": "user"}, r"messages\[3\], of the role 'user', has the content None, needs a string"),
        (
            {"role": "user", "content": [{"text": "x"}]},
            r"messages\[3\], of the role 'user', has the content \[",
        ),
    ],
)
def test_an_invalid_message_is_named(message: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        checked_message(3, message)


def test_a_call_needs_no_content() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    assert checked_message(0, message) == message
