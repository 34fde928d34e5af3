"""A real run over three hosts, which are network namespaces, with troubles of links and nodes.

Each host has an instance and a rollout worker. Engines and trainer are simulated; messages, samples and weights are
real."""

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from flexmarl.launch.bench.namespaces import Host, network_of

from ....patience import PATIENCE_S
from ...conftest import ONE_AGENT, Launcher, json_lines, wait_until, whole_lines
from ...run_files import trained_by_version
from .links import cut, cut_between, lossy, missing, needs

pytestmark = needs(missing())

QUERIES, TRAJECTORIES = 6, 2
OF_A_STEP = QUERIES * TRAJECTORIES
CUT_S = 5.0
# Turns take a second, and so does the installation of weights: both are met in their middle.
SLOW = (
    *ONE_AGENT,
    "agent_defaults.model=null",
    "engine={name: simulated, median_tokens: 10, sigma: 0.0, token_s: 0.1, install_s: 1.0}",
    "trainer.name=simulated",
)
FAST = "engine={name: simulated, median_tokens: 4, sigma: 0.0}"
TWO_NODES = ("far", "third")

# Writes a line of JSON about the samples of the trainer whenever they have changed. It runs on the head's host.
WATCH = """
import asyncio, contextlib, json, sys
import flexmarl
from flexmarl.actors.columns.column_refs import segments
from flexmarl.actors.errors import StoreError
from flexmarl.actors.messages import TrainerApi
from flexmarl.core.supervision.system_api import SystemApi
from flexmarl.actors.segments.segments import is_remote

async def is_there(run, name):
    found = await (await run._store_api()).column("solver", "tokens", [name])
    return any(map(is_remote, segments(found["tokens"])))

async def main():
    async with flexmarl.connect(sys.argv[1]) as run:
        await run._system.connect(run._address.address)
        trainer = await run._system.lookup("trainer", TrainerApi)
        process, before = run._system.ref("system", trainer.address, SystemApi).within(30), None
        while True:
            rows = await run.samples("status = 'ready' or status = 'leased'")
            figures = (await process.process_statistics()).actors.get("trainer", {})
            state = {
                "far_bytes": figures.get("store_bytes_from_hosts", 0.0),
                **{s: sorted(r["sample_id"] for r in rows if r["status"] == s) for s in ("ready", "leased")},
            }
            try:
                state["far"] = [name for name in state["ready"] if await is_there(run, name)]
            except StoreError:
                continue  # they were trained meanwhile
            if state != before:
                print(json.dumps(state), flush=True)
            before = state
            await asyncio.sleep(0.05)

with contextlib.suppress(KeyboardInterrupt):
    asyncio.run(main())
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Sequence[Host]]:
    with network_of("near", *TWO_NODES) as made:
        yield made


class Run:
    """A run over ``hosts``, and its nodes in their order."""

    def __init__(
        self,
        launcher: Launcher,
        name: str,
        hosts: Sequence[Host],
        supervision: str,
        *settings: str,
        queries: int = QUERIES,
    ) -> None:
        self.queries = queries
        self.trace = launcher.runs / f"{name}.trace"
        self.nodes = [
            launcher.node(name, node, "--wait-s", "120", on=host.command)
            for node, host in zip(TWO_NODES, hosts[1:], strict=True)
        ]
        self.run = launcher.train(
            name, *SLOW, "mode=sync", "agents.solver.instances=3", "rollout.workers=3", "hosts.spread=true",
            f"training={{queries_per_step: {queries}, trajectories_per_query: {TRAJECTORIES}, micro_batch: 4}}",
            "training.steps=1000000", "checkpoint.every=1", f"data.trace={self.trace}", supervision, *settings,
            f"network.listen={hosts[0].address}", "--nodes", "2", "--wait-s", "120", on=hosts[0].command,
        )  # fmt: skip
        self.run.wait_for_step(1)

    @property
    def steps(self) -> int:
        return whole_lines(self.run.directory / "metrics.jsonl")

    @property
    def trajectories(self) -> int:
        """Those of the training that have ended."""
        return self.trace.read_text().count("\n")

    def events(self, *names: str) -> list[dict[str, object]]:
        return [event for event in self.run.events if event["event"] in names]

    def continues(self) -> None:
        self.run.wait_for_step(self.steps + 2)

    def ends_well(self) -> None:
        """Stops it. Each sample of each step was trained once."""
        self.run.signal(signal.SIGINT)
        assert self.run.wait() == 130, self.run.text
        assert not any(line["failed_trajectories"] for line in self.run.metrics)
        assert {version: Counter(ids) for version, ids in trained_by_version(self.run.directory).items()} == {
            str(step): Counter(
                f"{step + 1}:q{step * self.queries + query:03d}_0_{n}"
                for query in range(self.queries)
                for n in range(TRAJECTORIES)
            )
            for step in range(self.steps)
        }
        for launched in (self.run, *self.nodes):
            launched.assert_nothing_is_left()


class Watch:
    def __init__(self, states: Path, process: subprocess.Popen[bytes]) -> None:
        self._states, self._process = states, process

    @property
    def state(self) -> dict[str, Any]:
        """The last one; nothing before the first."""
        return (json_lines(self._states) or [{"far_bytes": 0.0, "ready": [], "leased": [], "far": []}])[-1]

    def until(self, ready: int, leased: int, *, far_bytes_over: float = -1.0) -> dict[str, Any]:
        def there() -> bool:
            assert self._process.poll() is None, "the watching program has ended"
            state = self.state
            counts = len(state["ready"]), len(state["leased"])
            return counts == (ready, leased) and state["far_bytes"] > far_bytes_over

        wait_until(there, f"{ready} samples are ready and {leased} leased")
        return self.state


@contextmanager
def watch(made: Run, head: Host) -> Iterator[Watch]:
    states = made.trace.with_suffix(".states")
    command = [*head.command, sys.executable, "-P", "-c", WATCH, str(made.run.directory)]
    with states.open("w") as file, subprocess.Popen(command, stdout=file) as process:
        try:
            yield Watch(states, process)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)


def has_ended(process: psutil.Process) -> bool:
    """Also if its parent, which may be frozen, has not reaped it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_short_cuts_and_lost_packets_cost_only_time(launcher: Launcher, hosts: Sequence[Host]) -> None:
    made = Run(launcher, "short", hosts, "supervision={heartbeat_s: 3.0, missed_heartbeats: 20}")
    assert {"rollout-1", "rollout-2", "solver-1", "solver-2"} <= {
        actor for node in made.nodes for actor in node.actors()
    }
    assert all(
        {name.partition("-")[0] for name in node.actors()} == {"rollout", "solver"} for node in made.nodes
    )

    def in_mid_step() -> bool:
        return made.trajectories < (made.steps + 1) * OF_A_STEP

    def in_mid_update() -> bool:
        """The trajectories of a step have ended, and it has not: instances install its weights."""
        return made.trajectories == (made.steps + 1) * OF_A_STEP

    for what in (in_mid_step, in_mid_update):
        wait_until(what, what.__name__)
        with cut(hosts[2]):
            before = made.steps
            time.sleep(CUT_S)
            assert made.steps <= before + (what is in_mid_step), "an actor of the cut host was needed"
        made.continues()
    with lossy(hosts[1], 0.05):
        made.continues()
    assert not made.events("node_lost", "worker_lost", "actor_given_up", "actor_restarted", "run_resumed")
    assert not any(line["restarted_groups"] for line in made.run.metrics)
    made.ends_well()
    assert [node.wait() for node in made.nodes] == [0, 0]


def test_a_cut_host_and_a_frozen_one_are_given_up_and_their_groups_begin_again(
    launcher: Launcher, hosts: Sequence[Host], tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    hold.write_text(str(QUERIES))
    supervision = "supervision={heartbeat_s: 1.0, missed_heartbeats: 3}"
    made = Run(launcher, "given-up", hosts, supervision, f"data.hold={hold}")
    far, third = made.nodes
    # All groups of the second step are begun: a third of them on each host.
    wait_until(lambda: "step_000001" in made.run.text, "the second step has begun")
    frozen = [psutil.Process(far.process.pid), *far.actors().values()]
    (worker,) = (name for name in far.actors() if name.startswith("rollout-"))
    late = far.actors()[worker]
    for process in frozen:
        process.suspend()
    wait_until(lambda: len(made.events("worker_lost")) == 1, "the frozen worker is lost")
    with cut(hosts[2]):
        wait_until(lambda: len(made.events("worker_lost")) == 2, "the worker behind the cut is lost")
        assert third.wait() == 1, "it has lost its head"
        hold.unlink()
        made.continues()
        late.resume()  # its groups were held: it puts their samples now, which others have made again
        wait_until(lambda: has_ended(late), "the thawed worker has been refused, and ends")
        made.continues()
        for process in frozen:
            with suppress(psutil.NoSuchProcess):  # the node continues first, and ends the others
                process.resume()
        assert far.wait() == 1, "it was given up"
    log = (made.run.directory / "logs" / f"{worker}.log").read_text()
    assert "given it up for its silence" in log or "is retired" in log, log
    lost = made.events("worker_lost")
    assert [event["node"] for event in made.events("node_lost")] == ["far", "third"]
    restarted = sum(line["restarted_groups"] for line in made.run.metrics)
    assert restarted == sum(int(str(event["groups"])) for event in lost) > 0
    made.ends_well()


def test_a_cut_between_two_nodes_costs_their_workers_the_instance_behind_it_alone(
    launcher: Launcher, hosts: Sequence[Host]
) -> None:
    """The head reaches both: nothing is given up, and each instance gets turns of the workers that reach it."""
    made = Run(launcher, "between", hosts, "supervision={heartbeat_s: 1.0, missed_heartbeats: 5}")
    (solver, worker), (third_solver, third_worker) = (
        [next(name for name in node.actors() if name.startswith(role)) for role in ("solver-", "rollout-")]
        for node in made.nodes
    )
    behind = {(solver, f"{third_worker} can't reach it"), (third_solver, f"{worker} can't reach it")}

    def suspected() -> list[tuple[object, object]]:
        changes = [(event["instance"], event["reason"]) for event in made.events("instance_changed")]
        return [change for change in changes if change in behind]

    with cut_between(hosts[1], hosts[2]):
        wait_until(lambda: len(suspected()) >= 1, "a turn was lost behind the cut")
        for _ in range(4):
            made.continues()
        assert max(Counter(suspected()).values()) == 1, (
            "after its second loss a worker leaves the instance alone"
        )
    made.continues()
    assert not made.events("node_lost", "worker_lost", "actor_given_up", "actor_restarted", "run_resumed")
    made.ends_well()


def test_hosts_are_lost_with_unread_groups_and_with_one_that_is_trained_in_part(
    launcher: Launcher, hosts: Sequence[Host], tmp_path: Path
) -> None:
    """A micro-batch has seven samples, and a group two: when the fourth or the eleventh group of a step closes as the
    last one so far, one of its samples is trained, and one waits."""
    queries, hold = 12, tmp_path / "hold"
    hold.write_text(str(queries + 3))
    settings = ("mode=strict", "training.micro_batch=7", FAST, f"data.hold={hold}")
    supervision = "supervision={heartbeat_s: 1.0, missed_heartbeats: 4}"
    made = Run(launcher, "lost", hosts, supervision, *settings, queries=queries)
    with watch(made, hosts[0]) as seen:
        # Each of the three workers has closed a group of the second step, and has three that are held.
        assert len(seen.until(6, 0)["far"]) == 4
        made.nodes[0].lose_host()
        wait_until(lambda: made.events("worker_lost"), "the worker is lost")
        assert [event["groups"] for event in made.events("worker_lost")] == [4], "with the unread one"
        hold.write_text(str(2 * queries))
        made.run.wait_for_output("checkpoints/step_000002")
        assert sum(line["restarted_groups"] for line in made.run.metrics) == 4
        # The third step's groups are in turn those of the two workers that are left.
        hold.write_text(str(2 * queries + 3))
        read = seen.until(6, 0)["far_bytes"]
        hold.write_text(str(2 * queries + 4))
        state = seen.until(1, 7, far_bytes_over=read)
        if not state["far"]:  # that one is of the head's worker: four of the seven are of the other one's
            of_a_sample = (state["far_bytes"] - read) / 4
            hold.write_text(str(2 * queries + 10))
            seen.until(6, 14)
            hold.write_text(str(2 * queries + 11))
            state = seen.until(1, 21, far_bytes_over=read + 10.5 * of_a_sample)
        assert len(state["far"]) == 1
        made.nodes[1].lose_host()
        wait_until(lambda: len(made.events("worker_lost")) == 2, "the worker is lost")
    hold.unlink()
    made.run.wait_for_output("continuing after step 2")
    made.run.wait_for_step(4)
    (end,) = made.events("run_ended")
    assert "are lost, and others of their groups are trained already" in str(end["error"])
    made.ends_well()
