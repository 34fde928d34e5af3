"""Reward services of a run over two hosts: a worker asks that of its own, and a lost host costs its calls again."""

import contextlib
from collections import Counter
from pathlib import Path

import psutil

from flexmarl.launch.bench import namespaces
from flexmarl.launch.bench.namespaces import Host

from ...conftest import Launched, Launcher, wait_until
from ...run_files import events, trained
from ...test_reward_services import computing
from .links import cut, needs
from .test_run_over_nodes import SOON_LOST, begin

Pair = tuple[Host, Host]

STEPS, QUERIES, TRAJECTORIES = 3, 2, 2
CALLS = QUERIES * TRAJECTORIES
SETTINGS = (
    f"training={{steps: {STEPS}, queries_per_step: {QUERIES}, trajectories_per_query: {TRAJECTORIES}, micro_batch: 4}}",
    "checkpoint.every=1", "data.shape=scored", "hosts.spread=true", "rollout.workers=2",
)  # fmt: skip


def start(
    launcher: Launcher, name: str, hosts: Pair, hold: Path, processes: int, *settings: str
) -> tuple[Launched, Launched]:
    """A run whose rewards of step 2 wait for ``hold``, and its node: a worker and a service are on each host."""
    hold.write_text(str(QUERIES))
    services = f"rewards={{services: 2, processes: {processes}, timeout_s: 600}}"
    run, (node,) = begin(launcher, name, hosts, *SETTINGS, services, f"data.hold_rewards={hold}", *settings)
    run.wait_for_step(1)
    for role in ("rollout", "rewards"):
        assert f"{role}-0" in run.actors() and f"{role}-1" in node.actors()
    return run, node


def by_service(hold: Path, *launched: Launched) -> Counter[str]:
    """The number of functions that each service computes now."""
    actors = {actor.pid: name for run in launched for name, actor in run.actors().items()}
    services: Counter[str] = Counter()
    for pid in computing(hold):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            services[actors.get(psutil.Process(pid).ppid(), "none")] += 1
    return services


def assert_each_sample_is_trained_once(run: Launched) -> None:
    assert [line["step"] for line in run.metrics] == [*range(1, STEPS + 1)]
    assert sum(line["failed_trajectories"] for line in run.metrics) == 0
    counts = trained(run.directory)
    assert len(counts) == STEPS * CALLS and set(counts.values()) == {1}


def test_each_worker_asks_the_service_of_its_host_and_survives_the_loss_of_the_other(
    launcher: Launcher, hosts: Pair, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    run, node = start(launcher, "near", hosts, hold, CALLS)
    wait_until(lambda: len(computing(hold)) == CALLS, "all rewards of step 2 are computed")
    each = TRAJECTORIES * QUERIES // 2
    assert by_service(hold, run, node) == {"rewards-0": each, "rewards-1": each}, "each has room for all"
    node.process.kill()
    wait_until(
        lambda: by_service(hold, run) == {"rewards-0": CALLS},
        "the group of the lost worker begins again here",
    )
    hold.unlink()
    assert run.wait() == 0, run.text
    assert {"rollout-1", "rewards-1"} <= {event["actor"] for event in events(run.directory, "actor_given_up")}
    assert_each_sample_is_trained_once(run)
    for launched in (run, node):
        launched.assert_nothing_is_left()


@needs(namespaces.missing())
def test_calls_at_a_host_behind_a_cut_link_are_made_again_at_the_other(
    launcher: Launcher, hosts: Pair, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    run, node = start(launcher, "cut", hosts, hold, 1, *SOON_LOST)
    computes = {"rewards-0": 1, "rewards-1": 1}
    wait_until(
        lambda: by_service(hold, run, node) == computes,
        "each has the other worker's second call in its queue",
    )
    with cut(hosts[1]):
        wait_until(lambda: events(run.directory, "node_lost"), "the node is lost")
        assert node.wait() == 1, "it has lost its head"
        wait_until(lambda: by_service(hold, run) == {"rewards-0": 1}, "the processes over there have ended")
        hold.unlink()
        assert run.wait() == 0, run.text
    assert {"rollout-1", "rewards-1"} <= {event["actor"] for event in events(run.directory, "actor_given_up")}
    assert run.metrics[1]["repeated_rewards"] >= 1, "the call of this worker in the queue over there"
    assert_each_sample_is_trained_once(run)
    for launched in (run, node):
        launched.assert_nothing_is_left()
