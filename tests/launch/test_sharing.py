"""Runs that train each other's groups: they come and go, over CURVE too, and another task is refused by name."""

import asyncio
import shutil
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

import flexmarl
from flexmarl.actors.errors import ConfigError
from flexmarl.core.durable.files import replace_private
from flexmarl.launch.cli.main import main
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.run import run_control
from flexmarl.launch.sharing import sharing
from flexmarl.launch.sharing.shared_group import Task, task_of

from ..patience import PATIENCE_S
from .conftest import Launcher, json_lines, wait_until
from .in_process import run_in_loop
from .run_files import trained

GAME = Path(__file__).parent / "recipes" / "self_play"
"""The longer answer wins: with a simulated engine the rewards of a group differ."""
ASYNC = ("mode=async", "max_staleness=2", "agents.player.algorithm.correction=decoupled")
ENDLESS = (
    *ASYNC, "training.steps=100000", "checkpoint.every=100000", "rollout.workers=1",
    "engine.token_s=0.01", "engine.install_s=0.005", "trainer.micro_batch_s=0.01", "trainer.optimizer_s=0.3",
)  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ((), r"sharing\.peers is for mode=async: mode=strict trains what its own version has generated"),
        (("mode=sync",), r"sharing\.peers is for mode=async: mode=sync"),
        ((*ASYNC, "deterministic=true"), r"sharing\.peers and deterministic=true"),
        (
            ("mode=async", "agents.player.algorithm={old_policy: behaviour, correction: none}"),
            r"sharing\.peers and agents\.player\.algorithm\.old_policy=behaviour",
        ),
        ((*ASYNC, "sharing.peers.Other={file: x}"), r"sharing\.peers\.Other: lower-case letters"),
    ],
)
def test_a_run_that_can_not_train_text_of_others_is_refused(settings: tuple[str, ...], refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        resolve(str(GAME), ["sharing.peers.other={file: other.share}", *settings])


def changes(run: Path, peer: str) -> list[str]:
    return [
        event["state"]
        for event in json_lines(run / "events.jsonl")
        if event["event"] == "peer_changed" and event["peer"] == peer
    ]


def shared(run: Path) -> int:
    return sum(line.get("shared_groups", 0) for line in json_lines(run / "metrics.jsonl"))


def peer_samples(run: Path) -> Counter[str]:
    """The number of times that each sample of a peer was trained."""
    names = (name.partition(":")[2] for name in trained(run, "player").elements())
    return Counter(name for name in names if name.startswith("shared-"))


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


class Runs:
    """Runs of this loop that share by files in one folder: copies of their own addresses."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.folder, self._stack = folder, stack

    async def start(self, name: str, *settings: str, peers: str = "", recipe: Path = GAME) -> flexmarl.Run:
        """A run whose file is named by the part of ``name`` before a dash."""
        listed = [f"sharing.peers.{peer}={{file: {self.folder / peer}.share}}" for peer in peers.split()]
        opened = run_in_loop(self.folder, name, *ENDLESS, *settings, *listed, recipe=recipe)
        run = await self._stack.enter_async_context(opened)
        async with flexmarl.connect(run.directory.path, wait_s=PATIENCE_S):
            address = run.directory.control_address.read_bytes()
        replace_private(self.folder / f"{name.partition('-')[0]}.share", address)
        return run


@pytest.fixture
async def runs(tmp_path: Path) -> AsyncIterator[Runs]:
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        yield Runs(tmp_path, stack)


async def test_runs_train_each_others_groups_while_they_come_and_go(runs: Runs) -> None:
    first = await runs.start("a", peers="b")
    one = first.directory.path
    await until(lambda: changes(one, "b") == ["absent"])
    second = await runs.start("b", peers="a")
    two = second.directory.path
    await until(lambda: shared(one) and shared(two))
    assert changes(one, "b") == ["absent", "joined"] and changes(two, "a") == ["joined"]
    line = next(line for line in json_lines(one / "metrics.jsonl") if line.get("shared_groups"))
    assert line["logged_trajectories"] == 2 * line["shared_groups"]

    await first.stop()
    await until(lambda: changes(two, "a") == ["joined", "lost"])
    alone = len(json_lines(two / "metrics.jsonl"))
    await until(lambda: len(json_lines(two / "metrics.jsonl")) > alone + 2)
    before = shared(two)
    await runs.start("a-again", peers="b")
    await until(lambda: changes(two, "a") == ["joined", "lost", "joined"] and shared(two) > before)
    await second.stop()
    for run in (one, two):
        counts = peer_samples(run)
        assert counts and set(counts.values()) == {1}, "none is trained twice"
        failed = [event for event in json_lines(run / "events.jsonl") if event.get("state") == "dropped"]
        assert not failed
    assert not [name for name in peer_samples(two) if "shared-a" not in name], (
        "b trains no group of its own again"
    )


async def test_another_task_is_refused_by_name(runs: Runs, tmp_path: Path) -> None:
    recipe = tmp_path / "other_game"
    shutil.copytree(GAME, recipe)
    with (recipe / "workflow.py").open("a") as file:
        file.write("\n# another task\n")
    await runs.start("other", recipe=recipe)
    run = await runs.start("main", peers="other")
    path = run.directory.path
    await until(lambda: changes(path, "other"))
    (event,) = (line for line in json_lines(path / "events.jsonl") if line["event"] == "peer_changed")
    assert event["state"] == "refused"
    assert event["reason"].startswith("it trains other_game (workflow.py ")
    assert "and the peer self_play (workflow.py " in event["reason"]
    steps = len(json_lines(path / "metrics.jsonl"))
    await until(lambda: len(json_lines(path / "metrics.jsonl")) > steps)


async def test_a_peer_that_does_not_answer_is_absent_by_name(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of its recipe hangs: it lives, and can't say which task it trains."""
    read = threading.Event()

    def hang(config: RunConfig) -> Task:
        assert read.wait(PATIENCE_S)
        return task_of(config)

    monkeypatch.setattr(run_control, "task_of", hang)
    monkeypatch.setattr(sharing, "_ANSWER_S", 1.0)
    await runs.start("slow")
    run = await runs.start("main", peers="slow")
    path = run.directory.path
    await until(lambda: changes(path, "slow"))
    (event,) = (line for line in json_lines(path / "events.jsonl") if line["event"] == "peer_changed")
    assert (event["state"], event["reason"].partition(":")[0]) == (
        "absent", "it has not said within 1 s whether it shares",
    )  # fmt: skip
    monkeypatch.setattr(sharing, "_ANSWER_S", PATIENCE_S)
    read.set()
    await until(lambda: changes(path, "slow") == ["absent", "joined"] and shared(path))


def test_a_strict_run_shares_over_curve_with_those_that_it_admits(launcher: Launcher, tmp_path: Path) -> None:
    strict = ("mode=strict", "max_staleness=null", "network.listen=127.0.0.1")
    far = launcher.train("far", *ENDLESS, *strict, recipe=GAME)
    far.wait_for_step(1)
    for file, right in (("far", "share"), ("watcher", "watch")):
        assert main(["admit", str(far.directory), str(tmp_path / file), "--may", right]) == 0
        assert (tmp_path / file).read_text().startswith("tcp://127.0.0.1:")
    peers = [f"sharing.peers.{name}={{file: {tmp_path / name}}}" for name in ("far", "watcher")]
    run = launcher.train("near", *ENDLESS, *peers, recipe=GAME)
    wait_until(lambda: shared(run.directory) and changes(run.directory, "watcher"), "a shared group")
    (refused,) = (line for line in run.events if line.get("peer") == "watcher")
    assert refused["state"] == "absent" and "this client may not call it" in refused["reason"]
    far.lose_host()
    wait_until(lambda: changes(run.directory, "far") == ["joined", "lost"], "the loss of the peer")
    run.wait_for_step(len(run.metrics) + 2)
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.text
    counts = peer_samples(run.directory)
    assert counts and set(counts.values()) == {1}
    assert {name.split("-")[1] for name in counts} == {"far"}
    run.assert_nothing_is_left()


def test_a_peer_that_stands_still_is_lost_by_name_and_joins_again(launcher: Launcher, tmp_path: Path) -> None:
    """Its launcher is stopped, as by ctrl-Z: its socket takes all, and answers nothing."""
    peer = launcher.train("still", *ENDLESS, "network.listen=127.0.0.1", recipe=GAME)
    peer.wait_for_step(1)
    assert main(["admit", str(peer.directory), str(tmp_path / "still"), "--may", "share"]) == 0
    run = launcher.train(
        "moves", *ENDLESS, f"sharing.peers.still={{file: {tmp_path / 'still'}}}", recipe=GAME
    )
    wait_until(lambda: shared(run.directory), "a shared group")
    peer.signal(signal.SIGSTOP)
    wait_until(lambda: changes(run.directory, "still") == ["joined", "lost"], "the loss of the peer")
    (event,) = (line for line in run.events if line.get("state") == "lost")
    assert "silent for over 10 s: it hangs, is stopped, or was cut off" in event["reason"]
    run.wait_for_step(len(run.metrics) + 3)
    before = shared(run.directory)
    peer.signal(signal.SIGCONT)
    wait_until(lambda: shared(run.directory) > before, "further groups of the peer")
    assert changes(run.directory, "still") == ["joined", "lost", "joined"]
    for one in (run, peer):
        one.signal(signal.SIGINT)
        assert one.wait() == 130, one.text
        one.assert_nothing_is_left()
    counts = peer_samples(run.directory)
    assert counts and set(counts.values()) == {1}
