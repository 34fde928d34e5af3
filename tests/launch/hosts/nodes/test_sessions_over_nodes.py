"""Sessions of services in a run over two hosts: programs and rollout workers are on both."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from flexmarl.launch.bench.namespaces import Host

from ....patience import PATIENCE_S
from ...conftest import SIMULATED, Launched, Launcher, wait_until

ASK = """
import json, sys, urllib.error, urllib.request
method, url, key, body = sys.argv[1:]
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
request = urllib.request.Request(url, body.encode() or None, headers, method=method)
try:
    with urllib.request.urlopen(request) as response:
        print(json.dumps([response.status, json.load(response)]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, json.load(error)]))
"""
CALL = {"model": "solver", "messages": [{"role": "user", "content": "12="}]}


def ask(host: Host, method: str, url: str, key: str, body: Any = None) -> tuple[int, Any]:
    """A request of a program or a service on ``host``: the status and the body of its answer."""
    text = "" if body is None else json.dumps(body)
    command = [*host.command, sys.executable, "-I", "-c", ASK, method, url, key, text]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    status, answer = json.loads(done.stdout)
    return status, answer


def begin(launcher: Launcher, near: Host, far: Host, hold: Path) -> tuple[Launched, Launched]:
    """A run with a rollout worker on each host, whose steps wait until the file ``hold`` is gone."""
    hold.write_text("4")
    node = launcher.node("sessions", "far", "--wait-s", "120", on=far.command)
    settings = (
        "agents.solver.instances=2", "agents.solver.algorithm.name=reinforce_pp", "training.steps=1000000",
        "agents.solver.algorithm.correction=decoupled", "mode=async", "max_staleness=2", "hosts.spread=true",
        "rollout.workers=2", f"network.listen={near.address}", f"gateway.listen={near.address}:0",
        f"data.hold={hold}",
    )  # fmt: skip
    options = ("--nodes", "1", "--wait-s", "120")
    run = launcher.train("sessions", *SIMULATED, *settings, *options, on=near.command)
    run.wait_for_step(2)
    assert {"rollout-0", "rollout-1"} & set(node.actors()), "a worker is on the other host"
    return run, node


def test_sessions_of_both_hosts_are_rewarded_and_those_of_a_lost_host_are_lost_alone(
    launcher: Launcher, hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    (near, far), hold = hosts, tmp_path / "hold"
    run, node = begin(launcher, near, far, hold)
    (listens,) = [event for event in run.events if event["event"] == "gateway_listens"]
    url, key = str(listens["url"]), (run.directory / "gateway.key").read_text()
    sessions = []
    for _ in range(8):
        status, session = ask(near, "POST", f"{url}/sessions", key, {"lives_s": PATIENCE_S})
        assert status == 201, session
        sessions.append(session)
    for session in sessions:  # the program is on the other host than the gateway
        status, answer = ask(far, "POST", f"{session['url']}/v1/chat/completions", session["key"], CALL)
        assert status == 200, answer
    node.process.kill()

    def states() -> list[str]:
        return [ask(near, "GET", f"{url}/sessions/{session['id']}", key)[1]["state"] for session in sessions]

    wait_until(lambda: "lost" in states(), "the sessions of the lost host end")
    fates = set()
    for session in sessions:
        rewards_url, rewards = f"{url}/sessions/{session['id']}/rewards", {"agents": {"solver": 0.5}}
        status, answer = ask(near, "POST", f"{session['url']}/v1/chat/completions", session["key"], CALL)
        if status == 200:
            status, answer = ask(near, "POST", rewards_url, key, rewards)
            assert (status, answer["state"]) == (200, "rewarded"), answer
            fates.add("rewarded")
        else:
            assert (status, answer["error"]["code"]) == (410, "session_ended"), answer
            status, answer = ask(near, "POST", rewards_url, key, rewards)
            assert (status, "lost" in answer["error"]["message"]) == (410, True), answer
            fates.add("lost")
    assert fates == {"rewarded", "lost"}
    hold.unlink()
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.text
    for launched in (run, node):
        launched.assert_nothing_is_left()
