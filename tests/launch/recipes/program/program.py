"""An agent program: a solver's conversation of three turns, and a checker's look at the last one."""

import json
import os
import sys
import urllib.request
from typing import Any


def ask(model: str, messages: list[dict[str, str]]) -> dict[str, str]:
    """The answer's message."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": model, "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as response:
        answer: dict[str, Any] = json.load(response)
    message: dict[str, str] = answer["choices"][0]["message"]
    return message


messages = [{"role": "user", "content": sys.argv[1]}]
for number in range(3):
    messages += [ask("solver", messages), {"role": "user", "content": f"more {number}"}]
sys.stdout.write(ask("checker", [{"role": "user", "content": messages[-2]["content"]}])["content"])
