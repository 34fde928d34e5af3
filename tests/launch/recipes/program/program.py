"""An agent program: a solver's conversation of three turns, and a checker's look at the last one. A second argument
names a fault, in which it ends instead."""

import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any


def ask(
    model: str, messages: list[dict[str, str]], key: str = os.environ["OPENAI_API_KEY"]
) -> dict[str, str]:
    """The answer's message."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": model, "messages": messages}).encode(),
        {"Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request) as response:
        answer: dict[str, Any] = json.load(response)
    message: dict[str, str] = answer["choices"][0]["message"]
    return message


def close_in_mid_stream(messages: list[dict[str, str]]) -> None:
    """Asks for a stream, and closes the connection behind its first bytes."""
    url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    body = json.dumps({"model": "solver", "messages": messages, "stream": True})
    with socket.create_connection((url.hostname, url.port)) as connection:
        head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(body)}\r\n"
        key = f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\r\n\r\n"
        connection.sendall(f"{head}{key}{body}".encode())
        connection.recv(1)


def ask_at_once(messages: list[dict[str, str]], number: int) -> None:
    threads = [threading.Thread(target=ask, args=("solver", messages)) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def leave_daemon() -> None:
    """A process in a session of its own that outlives this one."""
    if not os.fork():
        os.setsid()
        if not os.fork():
            time.sleep(1000)
        os._exit(0)


def fail(fault: str, messages: list[dict[str, str]]) -> None:
    match fault:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs" | "waits":
            time.sleep(1000)
        case "daemon":
            leave_daemon()
            sys.exit("it leaves a daemon")
        case "dead key":
            ask("solver", messages, "fm-dead")
        case "mid-stream":
            close_in_mid_stream(messages)
            sys.exit("it has closed its stream")
        case "unknown model":
            ask("gpt-5", messages)
        case "too many turns":
            for _ in range(100):
                ask("solver", messages)


messages = [{"role": "user", "content": sys.argv[1]}]
if len(sys.argv) > 2:
    ask("solver", messages)
    fail(sys.argv[2], messages)
    ask_at_once(messages, 10)
for number in range(3):
    messages += [ask("solver", messages), {"role": "user", "content": f"more {number}"}]
sys.stdout.write(ask("checker", [{"role": "user", "content": messages[-2]["content"]}])["content"])
rewards = {"agents": {"solver": 1.0}, "turns": {"checker": [0.5]}}
Path(os.environ["FLEXMARL_REWARDS_FILE"]).write_text(json.dumps(rewards))
