"""Runs that stand still, each in another way: the cause is named, and the first ctrl-C ends the run."""

import contextlib
import io
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flexmarl.launch.cli.main import main

from .conftest import Launched, Launcher, wait_until
from .stall_ways import STALLED, STALLS, causes

SILENT_SERVER = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
accepted = []
while True:
    accepted.append(server.accept())
"""


@pytest.mark.parametrize("name", STALLED)
def test_its_cause_is_named_and_the_first_ctrl_c_ends_it(launcher: Launcher, name: str) -> None:
    stall = STALLED[name]
    run = launcher.train(re.sub(r"\W", "-", name), *stall.settings, recipe=STALLS)
    stall.trouble(run)
    wait_until(
        lambda: run.process.poll() is not None or any(re.search(stall.cause, cause) for cause in causes(run)),
        f"{stall.cause}\n{run.text}",
    )
    assert any(re.search(stall.cause, cause) for cause in causes(run)), run.text
    assert re.search(stall.cause, run.text), "the console has it too"
    assert "waits for" in status_of(run)
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.text
    assert ("last checkpoint" in run.text) == stall.checkpoint, run.text
    run.assert_nothing_is_left()


def status_of(run: Launched) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(["status", str(run.directory)]) == 0
    return output.getvalue()


def test_an_endpoint_that_accepts_and_is_silent_is_named(launcher: Launcher) -> None:
    command = [sys.executable, "-c", SILENT_SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
        endpoint = {"train": False, "engine": {"name": "openai", "base_url": url, "model": "m"}}
        policies = {"solver": {}, "helper": endpoint}
        agents = {name: {"policy": name} for name in policies}
        run = launcher.train(
            "silent-endpoint",
            f"agents={json.dumps(agents)}",
            f"policies={json.dumps(policies)}",
            recipe=STALLS,
        )
        cause = rf"helper-0: a turn of helper from the endpoint {url} \(5 attempts of engine.request_timeout_s=120\)"
        try:
            wait_until(lambda: any(re.search(cause, line) for line in causes(run)), run.text)
            run.signal(signal.SIGINT)
            assert run.wait() == 130, run.text
            assert "last checkpoint" in run.text
            run.assert_nothing_is_left()
        finally:
            server.kill()


def test_a_recipe_whose_import_hangs_is_named_and_ended_by_ctrl_c(launcher: Launcher, tmp_path: Path) -> None:
    shutil.copytree(STALLS, recipe := tmp_path / "recipe")
    workflow = recipe / "workflow.py"
    workflow.write_text(f"{workflow.read_text()}\n_compute_for_ever()\n")
    # The tests' own process may ignore ctrl-C, which its children inherit.
    prelude = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    run = launcher.train("import", recipe=recipe, prelude=prelude)
    run.wait_for_output("of at most 1800; it stands at workflow.py:")
    assert "in _compute_for_ever: time.sleep(3600.0)" in run.text
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.text
