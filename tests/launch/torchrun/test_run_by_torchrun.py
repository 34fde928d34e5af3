"""A run by a real torchrun: two of its nodes on this host, with two processes each."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from ..conftest import SIMULATED, SOURCES, TINY, json_lines, wait_until

ENTRY = ("-m", "flexmarl.launch.torchrun", str(TINY), *SIMULATED, "agent_defaults.instances=3")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}


@contextmanager
def torchrun(folder: Path, *settings: str, restarts: int = 0) -> Iterator[list[psutil.Popen]]:
    """The agents of two nodes; they write to ``out-0`` and ``out-1``."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    options += [
        "--rdzv-id=first",
        f"--max-restarts={restarts}",
        "--monitor-interval=0.1",
        f"--log-dir={folder}/logs",
    ]
    command = [sys.executable, "-P", "-m", "torch.distributed.run", *options, *ENTRY, *settings]
    agents: list[psutil.Popen] = []
    with ExitStack() as exits:
        for number in range(2):
            out = exits.enter_context((folder / f"out-{number}").open("wb"))
            agents.append(
                psutil.Popen(
                    command, cwd=folder, env=ENVIRONMENT, stdout=out, stderr=out, start_new_session=True
                )
            )
        try:
            yield agents
        finally:
            for agent in agents:
                for process in [agent, *_children(agent)]:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                agent.wait()


def _children(agent: psutil.Popen) -> list[psutil.Process]:
    try:
        return list(agent.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def text(folder: Path) -> str:
    return "\n".join((folder / f"out-{number}").read_text(errors="replace") for number in range(2))


def ended(agents: list[psutil.Popen], folder: Path) -> list[int]:
    wait_until(lambda: all(agent.poll() is not None for agent in agents), f"the end of\n{text(folder)}")
    return [agent.wait() for agent in agents]


def actor(agent: psutil.Popen, name: str) -> psutil.Process | None:
    """The process of an actor, which writes to the log of its name."""
    for process in _children(agent):
        try:
            if Path(f"/proc/{process.pid}/fd/2").readlink().stem == name:
                return process
        except OSError:
            continue
    return None


def test_a_run_over_two_nodes_is_continued_after_a_restart_and_all_ranks_end_with_it(tmp_path: Path) -> None:
    """The trainer is killed: torchrun starts all processes again, and the run is continued from its newest
    checkpoint."""
    run, hold = tmp_path / "runs" / "first", tmp_path / "hold"
    hold.write_text("4")  # the third step waits for the kill
    settings = ("training.steps=4", "checkpoint.every=1", f"data.hold={hold}")
    with torchrun(tmp_path, *settings, restarts=2) as agents:
        wait_until(
            lambda: len(json_lines(run / "metrics.jsonl")) >= 2 or any(agent.poll() for agent in agents),
            f"step 2 in\n{text(tmp_path)}",
        )
        head = next((agent for agent in agents if actor(agent, "trainer")), None)
        assert head is not None, text(tmp_path)
        trainer = actor(head, "trainer")
        assert trainer is not None
        trainer.kill()
        hold.unlink()
        assert ended(agents, tmp_path) == [0, 0], text(tmp_path)
    events = json_lines(run / "events.jsonl")
    assert [event["event"] for event in events if event["event"] in ("run_started", "run_resumed")] == [
        "run_started",
        "run_resumed",
    ]
    resumed = next(event for event in events if event["event"] == "run_resumed")
    assert resumed["step"] >= 1
    assert text(tmp_path).count("has joined the run") == 2, "the other node, twice"
    assert [metric["step"] for metric in json_lines(run / "metrics.jsonl")] == [1, 2, 3, 4]
