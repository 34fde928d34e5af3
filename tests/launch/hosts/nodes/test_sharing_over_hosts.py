"""Runs on two hosts train each other's groups, are cut off from each other, and join again when the link is back."""

import signal
from pathlib import Path

from flexmarl.launch.bench import namespaces
from flexmarl.launch.bench.namespaces import Host

from ...conftest import Launched, Launcher, wait_until
from ...test_sharing import ENDLESS, GAME, changes, peer_samples, shared
from .links import cut, needs

# The runs compute until they notice the cut. A busy machine keeps no process waiting for as long.
SOON_LOST = ("supervision.heartbeat_s=1.0", "supervision.missed_heartbeats=6")


def begin(launcher: Launcher, name: str, peer: str, host: Host, files: Path) -> Launched:
    """A run that listens on its host's address, looks for the peer's file, and has written its own."""
    sharing = f"sharing.peers.{peer}={{file: {files / peer}}}"
    listen = f"network.listen={host.address}"
    run = launcher.train(name, *ENDLESS, *SOON_LOST, listen, sharing, recipe=GAME, on=host.command)
    run.wait_for_step(1)
    admit = ("admit", str(run.directory), str(files / name), "--may", "share")
    admitted = Launched(run.directory, *admit, on=host.command, warm=True)
    assert admitted.wait() == 0, admitted.text
    admitted.close()
    return run


@needs(namespaces.missing())
def test_runs_share_again_after_their_link_was_cut_and_train_nothing_twice(
    launcher: Launcher, hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    near, far = hosts
    runs = [begin(launcher, "near", "far", near, tmp_path), begin(launcher, "far", "near", far, tmp_path)]
    peers = {run.directory: peer for run, peer in zip(runs, ("far", "near"), strict=True)}

    def all_share_more_than(before: dict[Path, int]) -> bool:
        return all(shared(folder) > count for folder, count in before.items())

    wait_until(lambda: all_share_more_than(dict.fromkeys(peers, 0)), "groups of each other")
    with cut(far):
        wait_until(
            lambda: all(changes(*pair)[-1] == "lost" for pair in peers.items()), "the loss of each other"
        )
        for run in runs:  # groups that wait are trained, and then each run alone
            run.wait_for_step(len(run.metrics) + 8)
        alone = {folder: shared(folder) for folder in peers}
    wait_until(lambda: all_share_more_than(alone), "further groups of each other")
    for run in runs:
        run.signal(signal.SIGINT)
    for run in runs:
        assert run.wait() == 130, run.text
        run.assert_nothing_is_left()
        peer = peers[run.directory]
        states = changes(run.directory, peer)
        assert set(states) <= {"absent", "joined", "lost"}, "none is refused, and no group is dropped"
        counts = peer_samples(run.directory)
        assert set(counts.values()) == {1}, "none is trained twice"
        assert {name.split("-")[1] for name in counts} == {peer}, "no group comes back to its own run"
        assert len(counts) >= shared(run.directory) > 0
