"""Real runs whose policies have ranks on two hosts, which are network namespaces. Trainers and engines compute."""

from pathlib import Path

import pytest

from flexmarl.launch.bench import namespaces
from flexmarl.launch.bench.namespaces import Host

from ...conftest import REPRODUCIBLE, Launched, Launcher, json_lines, wait_until
from ...in_process import Finished
from ...run_files import events
from .links import cut, needs

Pair = tuple[Host, Host]

# For a link that is cut: the end of a process is seen without heartbeats, which a busy machine may overrun.
SOON_LOST = ("supervision.heartbeat_s=0.5", "supervision.missed_heartbeats=6")
GANGS = (
    "trainer={name: torch, ranks: 2}", "pool={name: shared, slots: 2}", "hosts.spread=true",
    "network.bulk=trusted", "checkpoint.every=0", "supervision.max_restarts=100",
)  # fmt: skip


LOGGED = ("--log-level", "debug")


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """The file that holds back the trajectories of the second step and of later ones."""
    hold = tmp_path / "hold"
    hold.write_text("1")
    return hold


def begin(launcher: Launcher, name: str, hosts: Pair, *settings: str) -> tuple[Launched, dict[str, Launched]]:
    """A run with a node on each host: the head has actors enough, so that each node gets a slot."""
    nodes = {
        node: launcher.node(name, node, "--wait-s", "120", on=host.command)
        for node, host in zip(("close", "far"), hosts, strict=True)
    }
    listen = f"network.listen={hosts[0].address}"
    options = ("--nodes", str(len(nodes)), "--wait-s", "120")
    run = launcher.train(name, *REPRODUCIBLE, *GANGS, listen, *settings, *options, on=hosts[0].command)
    return run, nodes


def wait_for_second_copies(run: Launched, version: int) -> None:
    """Returns when the state of ``version`` is whole on two hosts, for each rank: before, the state may be lost with a
    host. ``run``: with the option ``LOGGED``."""
    ranks = {f"{policy}-{rank}" for policy in ("solver", "checker") for rank in range(2)}

    def copied() -> set[str]:
        lines = json_lines(run.directory / "logs" / "trainer.log")
        copies = [line for line in lines if line.get("event") == "a state has a second copy"]
        return {copy["rank"] for copy in copies if (copy["part"], copy["version"]) == ("rest", version)}

    wait_until(lambda: copied() == ranks, f"second copies of version {version}")


def slots_of(launched: Launched) -> set[str]:
    return {name for name in launched.actors() if name.startswith("slot-")}


def losses(run: Launched | Finished) -> list[float]:
    return [line[f"loss/{policy}"] for line in run.metrics for policy in ("solver", "checker")]


def assert_learns_the_same(run: Launched, undisturbed: Finished) -> None:
    """Without a restart of the run: each sample was trained once."""
    assert run.wait() == 0, run.text
    assert "continuing" not in run.text
    assert losses(run) == pytest.approx(losses(undisturbed), abs=1e-6)
    assert [line["step"] for line in run.metrics] == [line["step"] for line in undisturbed.metrics]


def test_ranks_on_two_hosts_learn_what_one_rank_learns_also_after_a_kill_and_the_loss_of_a_host(
    launcher: Launcher, hosts: Pair, undisturbed: Finished, hold: Path
) -> None:
    run, nodes = begin(launcher, "gangs", hosts, f"data.hold={hold}", *LOGGED)
    run.wait_for_step(1)
    assert sorted(map(slots_of, nodes.values()), key=sorted) == [{"slot-0"}, {"slot-1"}]
    (name,) = slots_of(nodes["far"])
    nodes["far"].actors()[name].kill()
    hold.write_text("2")
    run.wait_for_step(2)
    wait_for_second_copies(run, 2)
    assert slots_of(nodes["far"]) == {name}, "it has begun again on its host"
    nodes["far"].process.kill()
    hold.unlink()
    assert_learns_the_same(run, undisturbed)
    assert [event["slot"] for event in events(run.directory, "slot_lost")][:1] == [name]
    (moved,) = [event for event in events(run.directory, "actor_moved") if event["actor"] == name]
    assert moved["node"] != "far" and "node far is lost: its process ended" in str(moved["reason"])
    for launched in (run, *nodes.values()):
        launched.assert_nothing_is_left()


def test_a_replica_on_each_host_learns_what_one_rank_learns_also_after_a_kill(
    launcher: Launcher, hosts: Pair, undisturbed: Finished, hold: Path
) -> None:
    hybrid = ("trainer={name: torch, ranks: 4, replicas: 2}", "pool={name: shared, slots: 4}")
    run, nodes = begin(launcher, "replicas", hosts, *hybrid, f"data.hold={hold}")
    run.wait_for_step(1)
    replicas = [{"slot-0", "slot-1"}, {"slot-2", "slot-3"}]
    assert sorted(map(slots_of, nodes.values()), key=sorted) == replicas
    nodes["far"].actors()[min(slots_of(nodes["far"]))].kill()
    hold.unlink()
    assert_learns_the_same(run, undisturbed)
    assert events(run.directory, "slot_lost") and not events(run.directory, "actor_moved")
    for launched in (run, *nodes.values()):
        launched.assert_nothing_is_left()


@needs(namespaces.missing())
def test_a_gang_whose_link_is_cut_is_whole_again_without_that_host(
    launcher: Launcher, hosts: Pair, undisturbed: Finished, hold: Path
) -> None:
    run, nodes = begin(launcher, "cut", hosts, *SOON_LOST, f"data.hold={hold}", *LOGGED)
    run.wait_for_step(1)
    wait_for_second_copies(run, 1)
    (name,) = slots_of(nodes["far"])
    with cut(hosts[1]):
        hold.unlink()
        wait_until(
            lambda: [event for event in events(run.directory, "actor_moved") if event["actor"] == name],
            "a move",
        )
        assert_learns_the_same(run, undisturbed)
        assert nodes["far"].wait() == 1, "it has lost its head"
    assert "silent for over" in str(events(run.directory, "node_lost")[0]["reason"])
    for launched in (run, *nodes.values()):
        launched.assert_nothing_is_left()


def test_ranks_over_hosts_are_refused_on_a_network_that_is_not_trusted(
    launcher: Launcher, hosts: Pair
) -> None:
    run, nodes = begin(launcher, "plain", hosts, "network.bulk=encrypted")
    assert run.wait() == 1 and not run.metrics
    assert "the ranks of policy solver lie on several hosts, and a process group is not encrypted" in run.text
    assert "write network.bulk=trusted if all machines of that network are" in run.text
    assert [node.wait() for node in nodes.values()] == [1, 1], "it has failed"
