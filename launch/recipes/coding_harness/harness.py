"""A coding harness: it has a fixer repair a file of failing tests, and a reviewer judge each repair.

    python harness.py CLIENT TESTS     ["37+4!148", ...]: 37+4 is not 148, with another operator it is

It knows nothing of a run: it reads the variables of OpenAI's clients, and writes rewards to FLEXMARL_REWARDS_FILE.
CLIENT is ``http``, or ``openai`` for OpenAI's package, whose import takes longer than all of the repairs.

    fixer       user 37+4!148    37-4      the harness runs it: 33
                user 33          37*4      a second attempt, in the same conversation
    reviewer    user 148!148     ok
"""

import http.client
import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ATTEMPTS = 2


def value(expression: str) -> int | None:
    """None for anything else than a+b, a-b or a*b."""
    parts = re.fullmatch(r"(\d+)([-+*])(\d+)", expression)
    if parts is None:
        return None
    a, b = int(parts[1]), int(parts[3])
    return {"+": a + b, "-": a - b, "*": a * b}[parts[2]]


class HttpClient:
    """OpenAI's chat API over one connection."""

    def __init__(self) -> None:
        url = urlsplit(os.environ["OPENAI_BASE_URL"])
        self._path = f"{url.path}/chat/completions"
        self._connection = http.client.HTTPConnection(url.netloc)
        self._headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}

    def ask(self, model: str, messages: list[dict[str, str]]) -> str:
        body = json.dumps({"model": model, "messages": messages, "max_tokens": 4096})
        self._connection.request("POST", self._path, body, self._headers)
        answer: dict[str, Any] = json.load(self._connection.getresponse())
        if "error" in answer:
            sys.exit(answer["error"]["message"])
        return answer["choices"][0]["message"]["content"] or ""


class OpenaiClient:
    """OpenAI's package."""

    def __init__(self) -> None:
        from openai import OpenAI

        self._client = OpenAI()

    def ask(self, model: str, messages: Any) -> str:
        answer = self._client.chat.completions.create(model=model, messages=messages, max_tokens=4096)
        return answer.choices[0].message.content or ""


def repair(client: Any, test: str) -> tuple[list[float], str]:
    """The fixer's rewards, and the value of its last expression."""
    failing, _, target = test.partition("!")
    numbers = re.split(r"[-+*]", failing)
    messages, rewards, result = [{"role": "user", "content": test}], [], ""
    for _ in range(ATTEMPTS):
        expression = client.ask("fixer", messages)
        number = value(expression)
        result = "" if number is None else str(number)
        solved = result == target and re.split(r"[-+*]", expression) == numbers
        rewards.append(float(solved))
        if solved:
            break
        messages += [
            {"role": "assistant", "content": expression},
            {"role": "user", "content": result or "no"},
        ]
    return rewards, result


def review(client: Any, result: str, target: str) -> float:
    verdict = client.ask("reviewer", [{"role": "user", "content": f"{result or 'no'}!{target}"}])
    return float(verdict == ("ok" if result == target else "no"))


def main() -> None:
    _, name, tests = sys.argv
    client = OpenaiClient() if name == "openai" else HttpClient()
    fixer: list[float] = []
    reviewer: list[float] = []
    solved: list[float] = []
    for test in json.loads(tests):
        rewards, result = repair(client, test)
        fixer += rewards
        solved.append(rewards[-1])
        reviewer.append(review(client, result, test.partition("!")[2]))
    report = {
        "turns": {"fixer": fixer, "reviewer": reviewer},
        "metrics": {
            "accuracy": sum(solved) / len(solved),
            "first_attempts": sum(fixer) / len(fixer),
            "reviews": sum(reviewer) / len(reviewer),
        },
    }
    Path(os.environ["FLEXMARL_REWARDS_FILE"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
