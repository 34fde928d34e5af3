"""Real runs over two hosts, which are network namespaces. Engines and trainer are simulated; weights are real."""

import signal
from collections.abc import Sequence
from pathlib import Path

from flexmarl.core.wire.curve import Keys
from flexmarl.launch.bench import namespaces
from flexmarl.launch.bench.namespaces import Host

from ...conftest import SIMULATED, Launched, Launcher, wait_until
from ...run_files import events
from .links import cut, needs

Pair = tuple[Host, Host]

# For a link that is cut: the end of a process is seen without heartbeats, which a busy machine may overrun.
SOON_LOST = ("supervision.heartbeat_s=0.5", "supervision.missed_heartbeats=3")
# Steps of a run without an end take a moment: else all cores compute while a test waits for something else.
ENDLESS = ("training.steps=1000000", "trainer.optimizer_s=0.2")


def begin(
    launcher: Launcher, name: str, hosts: Pair, *settings: str, nodes: Sequence[str] = ("far",)
) -> tuple[Launched, list[Launched]]:
    near, far = hosts
    joining = [launcher.node(name, node, "--wait-s", "120", on=far.command) for node in nodes]
    listen = f"network.listen={near.address}"
    options = ("--nodes", str(len(nodes)), "--wait-s", "120")
    run = launcher.train(
        name, *SIMULATED, "agents.solver.instances=2", listen, *settings, *options, on=near.command
    )
    return run, joining


def endless(launcher: Launcher, name: str, hosts: Pair, *settings: str) -> tuple[Launched, list[Launched]]:
    run, nodes = begin(launcher, name, hosts, *ENDLESS, *settings)
    run.wait_for_step(2)
    return run, nodes


def continues(run: Launched) -> None:
    run.wait_for_step(len(run.metrics) + 3)


def test_actors_are_on_both_hosts_and_end_with_the_run(launcher: Launcher, hosts: Pair) -> None:
    run, (node,) = endless(launcher, "both", hosts)
    there, here = set(node.actors()), set(run.actors())
    instances = {f"solver-{number}" for number in range(2)}
    assert there and there <= instances <= there | here
    assert {"store", "trainer", "router", "orchestrator", "rollout-0"} <= here
    continues(run)
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.text
    assert node.wait() == 0, node.text
    assert "node far has joined the run" in node.text and "the node ends: the run has ended" in node.text
    chosen = events(run.directory, "weights_path_chosen")
    assert {event["instance"] for event in chosen} == instances
    # One that comes late finds the copy that another one of its host has fetched.
    assert "tcp" in {event["path"] for event in chosen if event["instance"] in there} <= {"tcp", "shm"}
    for launched in (run, node):
        launched.assert_nothing_is_left()
    run.assert_logs_are_clean()


def test_rollout_workers_and_slots_may_be_on_all_hosts(launcher: Launcher, hosts: Pair) -> None:
    settings = ("hosts.spread=true", "rollout.workers=2", "pool={name: shared, slots: 2}", "training.steps=6")
    run, (node,) = begin(launcher, "spread", hosts, *settings)
    node.wait_for_output("node far has joined the run")
    assert run.wait() == 0, run.text
    assert node.wait() == 0, node.text
    there = {path.stem for path in (run.directory / "logs").glob("*.log")}
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert not any(line["failed_trajectories"] for line in run.metrics)
    assert {"rollout-0", "rollout-1", "slot-0", "slot-1"} <= there
    for launched in (run, node):
        launched.assert_nothing_is_left()


def test_a_killed_node_costs_its_turns_a_retry_and_its_instances_move(
    launcher: Launcher, hosts: Pair
) -> None:
    run, (node,) = endless(launcher, "killed", hosts)
    there = set(node.actors())
    node.process.kill()
    wait_until(
        lambda: len(events(run.directory, "actor_restarted")) >= len(there), "its instances are restarted"
    )
    (lost,) = events(run.directory, "node_lost")
    assert lost["node"] == "far" and "its process ended" in str(lost["reason"])
    assert {event["actor"] for event in events(run.directory, "actor_restarted")} == there
    wait_until(lambda: there <= set(run.actors()), "they run here")
    continues(run)
    assert not any(line["failed_trajectories"] for line in run.metrics)
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.text
    for launched in (run, node):
        launched.assert_nothing_is_left()


def test_of_a_killed_head_nothing_stays_on_any_host(launcher: Launcher, hosts: Pair) -> None:
    run, (node,) = endless(launcher, "headless", hosts)
    run.process.kill()
    assert node.wait() == 1
    assert "actor nodes died" in node.text
    for launched in (run, node):
        launched.assert_nothing_is_left()


def test_after_the_loss_of_the_trainer_the_run_continues_on_the_nodes_that_are_there(
    launcher: Launcher, hosts: Pair
) -> None:
    near, far = hosts
    node = launcher.node("again", "far", "--again", on=far.command)
    settings = ("agents.solver.instances=2", *ENDLESS, "checkpoint.every=1")
    run = launcher.train(
        "again", *SIMULATED, *settings, f"network.listen={near.address}", "--nodes", "1", "--restarts", "2",
        on=near.command,
    )  # fmt: skip
    run.wait_for_output("checkpoints/step_000002")
    run.actors()["trainer"].kill()
    run.wait_for_output("continuing after step")
    wait_until(lambda: node.text.count("has joined the run") == 2, "the node is there again")
    continues(run)
    node.wait_for_output("waiting for the run: ")
    node.process.kill()
    run.actors()["trainer"].kill()
    wait_until(lambda: run.text.count("continuing after step") == 2, "it continues without the node")
    continues(run)
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.text
    for launched in (run, node):
        launched.assert_nothing_is_left()


@needs(namespaces.missing())
def test_a_node_behind_a_cut_link_is_given_up_and_ends(launcher: Launcher, hosts: Pair) -> None:
    run, (node,) = endless(launcher, "cut", hosts, *SOON_LOST)
    with cut(hosts[1]):
        wait_until(lambda: events(run.directory, "node_lost"), "the node is lost")
        assert "silent for over" in str(events(run.directory, "node_lost")[0]["reason"])
        continues(run)
        assert node.wait() == 1, "it has lost its head"
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.text
    for launched in (run, node):
        launched.assert_nothing_is_left()


def test_others_are_refused_by_name_before_anything_is_trained(
    launcher: Launcher, hosts: Pair, tmp_path: Path
) -> None:
    near, far = hosts
    run = launcher.train(
        "waits", *SIMULATED, f"network.listen={near.address}", "--nodes", "2", on=near.command
    )
    run.wait_for_output("flexmarl node --join")
    address = run.directory / "address"
    first = launcher.node("waits", "same", on=far.command)
    first.wait_for_output("has joined the run")
    second = launcher.node("waits", "same", on=far.command)
    assert second.wait() == 2 and "there is a node of the name same already" in second.text
    stranger = tmp_path / "address"
    stranger.write_text(f"{address.read_text().splitlines()[0]}\n{Keys.make().to_json()}")
    stranger.chmod(0o600)
    third = launcher.node("waits", "stranger", "--join", str(stranger), "--wait-s", "1", on=far.command)
    assert third.wait() == 2 and "the handshake fails; has it got other keys" in third.text
    run.signal(signal.SIGTERM)
    assert run.wait() == 130 and not run.metrics
    assert first.wait() == 0
    for launched in (run, first, second, third):
        launched.assert_nothing_is_left()


def test_too_few_nodes_end_the_run_with_their_names(launcher: Launcher, hosts: Pair) -> None:
    near, _ = hosts
    run = launcher.train(
        "few",
        *SIMULATED,
        f"network.listen={near.address}",
        "--nodes",
        "1",
        "--wait-s",
        "0.1",
        on=near.command,
    )
    assert run.wait() == 1
    assert "1 nodes had to join within 0.1 s (--wait-s): there is none" in run.text
    run.assert_nothing_is_left()


def test_nodes_that_could_not_reach_the_head_are_not_waited_for(launcher: Launcher) -> None:
    run = launcher.train("unreachable", *SIMULATED, "--nodes", "1")
    assert run.wait() == 1
    assert "--nodes 1: other hosts can't reach this one: write network.listen=ADDRESS" in run.text


def test_an_address_of_another_host_is_refused(launcher: Launcher) -> None:
    run = launcher.train("elsewhere", *SIMULATED, "network.listen=203.0.113.7")  # RFC 5737: of no host
    assert run.wait() == 2 and "network.listen=203.0.113.7: this host can't listen there" in run.text
    run.assert_nothing_is_left()
