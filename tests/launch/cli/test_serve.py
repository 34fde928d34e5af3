"""``flexmarl serve``: the policies of a run, by OpenAI's API, until ctrl-C."""

import re
import signal
from typing import Any

import httpx2

from ...patience import PATIENCE_S
from ..conftest import SIMULATED, Launcher, wait_until
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


def test_several_workers_serve_in_turn_and_one_that_is_lost_is_replaced(
    runs_here: RunsHere, launcher: Launcher
) -> None:
    trained = runs_here.train("trained-for-two", *SIMULATED, "training.steps=1")
    assert trained.status == 0, trained.text
    serving = launcher.serve("two", trained.directory, "rollout.workers=2", "--listen", "0")
    serving.wait_for_output("the key in")
    url = re.search(r"(http://127\.0\.0\.1:\d+)", serving.text)
    assert url is not None, serving.text
    key = (serving.directory / "gateway.key").read_text()
    replies = [ask(url[1], key) for _ in range(4)]
    assert [reply.status_code for reply in replies] == [200] * 4, [reply.text for reply in replies]
    assert len({reply.json()["id"] for reply in replies}) == 4
    workers = serving.actors()
    assert {"rollout-0", "rollout-1"} <= set(workers)
    workers["rollout-0"].kill()
    answered = []

    def all_answer() -> bool:
        for reply in (ask(url[1], key) for _ in range(4)):
            assert reply.status_code in (200, 503), reply.text
            answered.append(reply.status_code)
            if reply.status_code == 503:
                assert reply.json()["error"]["code"] in ("worker_lost", "not_begun"), reply.text
                assert reply.headers["retry-after"] == "1"
        restarted = serving.actors().get("rollout-0")
        return restarted not in (None, workers["rollout-0"]) and answered[-4:] == [200] * 4

    wait_until(all_answer, "the lost worker is replaced")
    serving.signal(signal.SIGINT)
    assert serving.wait() == 130, serving.text
    serving.assert_nothing_is_left()
