"""Real runs whose policies have ranks on two hosts, which are network namespaces. Trainers and engines compute."""

import pytest

from flexmarl.launch.bench.namespaces import Host

from ...conftest import REPRODUCIBLE, Launched, Launcher

Pair = tuple[Host, Host]

SUPERVISION = "supervision={heartbeat_s: 0.5, missed_heartbeats: 6, max_restarts: 100}"
GANGS = (
    "trainer={name: torch, ranks: 2}", "pool={name: shared, slots: 2}", "hosts.spread=true",
    "network.bulk=trusted", "checkpoint.every=0", SUPERVISION,
)  # fmt: skip


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


def slots_of(launched: Launched) -> set[str]:
    return {name for name in launched.actors() if name.startswith("slot-")}


def losses(run: Launched) -> list[float]:
    return [line[f"loss/{policy}"] for line in run.metrics for policy in ("solver", "checker")]


def events(run: Launched, name: str) -> list[dict[str, object]]:
    return [event for event in run.events if event["event"] == name]


def test_ranks_on_two_hosts_learn_what_one_rank_learns(
    launcher: Launcher, hosts: Pair, whole: Launched
) -> None:
    run, nodes = begin(launcher, "gangs", hosts)
    run.wait_for_step(1)
    assert sorted(map(slots_of, nodes.values()), key=sorted) == [{"slot-0"}, {"slot-1"}]
    assert run.wait() == 0, run.text
    assert losses(run) == pytest.approx(losses(whole), abs=1e-6)
    assert [line["step"] for line in run.metrics] == [line["step"] for line in whole.metrics]
    for launched in (run, *nodes.values()):
        launched.assert_nothing_is_left()
    run.assert_logs_are_clean()
