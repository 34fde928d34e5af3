"""``flexmarl serve``: the policies of a run, by OpenAI's API, until ctrl-C."""

import re
import signal
from typing import Any

import httpx2

from ...patience import PATIENCE_S
from ..conftest import SIMULATED, Launcher
from ..in_process import RunsHere


def ask(url: str, key: str, **asked: Any) -> httpx2.Response:
    call = {"model": "solver", "messages": [{"role": "user", "content": "12="}], **asked}
    headers = {"authorization": f"Bearer {key}"}
    return httpx2.post(f"{url}/v1/chat/completions", json=call, headers=headers, timeout=PATIENCE_S)


def test_the_newest_policies_of_a_run_are_served_until_ctrl_c(
    runs_here: RunsHere, launcher: Launcher
) -> None:
    trained = runs_here.train("trained", *SIMULATED, "training.steps=1")
    assert trained.status == 0, trained.text
    serving = launcher.serve("served", trained.directory, "--checkpoint", "1", "--listen", "0")
    serving.wait_for_output("the key in")
    key = re.search(r"key: (\S+)", serving.text)
    url = re.search(r"(http://127\.0\.0\.1:\d+)", serving.text)
    assert key is not None and url is not None, serving.text
    first, second = (ask(url[1], key[1]) for _ in range(2))
    assert first.status_code == second.status_code == 200, first.text
    assert first.json()["id"] != second.json()["id"]
    streamed = ask(url[1], key[1], stream=True)
    assert streamed.text.endswith("data: [DONE]\n\n"), streamed.text
    assert ask(url[1], "wrong").status_code == 401
    assert "there is: solver" in ask(url[1], key[1], model="judge").json()["error"]["message"]
    opened = httpx2.post(
        f"{url[1]}/sessions", headers={"authorization": f"Bearer {key[1]}"}, timeout=PATIENCE_S
    )
    assert (opened.status_code, opened.json()["error"]["code"]) == (409, "no_sessions")
    serving.signal(signal.SIGINT)
    assert serving.wait() == 130, serving.text
    logs = "".join(path.read_text() for path in (serving.directory / "logs").iterdir())
    assert key[1] not in logs
    serving.assert_nothing_is_left()
