"""Two runs of real models that share: transformers of other shapes, text between them, a receiver that is killed."""

import json
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from flexmarl.actors.compared_logprobs import compared_of
from flexmarl.launch.cli.main import main

from .conftest import Launched, Launcher, wait_until
from .stall_ways import MODEL
from .test_sharing import changes, shared

SETTINGS = (
    "agents={solver: {}}", "data.shape=alone", "engine={name: embedded}", "trainer={name: torch}", "mode=async",
    "max_staleness=2", "agents.solver.algorithm.correction=decoupled", "training.steps=100000",
    "checkpoint={every: 1, keep: 3}", "rollout.workers=1", "network.listen=127.0.0.1", "sharing.share=0.5",
    "samples.steps=100000", "agent_defaults.optimizer.lr=1.0e-6",  # else the rewards of a group soon differ no more
)  # fmt: skip


def model(**changes: int) -> str:
    config = {**MODEL["config"], **changes}  # type: ignore[dict-item]  # a mapping
    return f"agent_defaults.model={json.dumps({**MODEL, 'config': config})}"


def admit(run: Launched, file: Path) -> None:
    run.wait_for_step(1)
    assert main(["admit", str(run.directory), str(file), "--may", "share"]) == 0


class Received:
    """The groups of the other run that a run has, by its files."""

    def __init__(self, run: Path) -> None:
        with closing(sqlite3.connect(run / "samples.sqlite", timeout=30.0)) as database:
            rows = database.execute("SELECT step, query FROM records WHERE evaluation = 0").fetchall()
            compared = database.execute("SELECT step, query, content FROM compared").fetchall()
        self.records = [(step, query) for step, query in rows if query.startswith("shared-")]
        self.others = [(step, query) for step, query in rows if not query.startswith("shared-")]
        self.trained: Counter[tuple[str, int, int]] = Counter()
        """Counts the times that the trainer has computed each sample, by query, trajectory and turn."""
        self.trained_groups: set[tuple[int, str]] = set()
        for step, query, content in compared:
            if query.startswith("shared-"):
                self.trained.update((query, *sample) for sample in compared_of(content))
                self.trained_groups.add((step, query))


def test_each_group_of_another_model_counts_once_also_when_the_receiver_is_killed_in_a_step(
    launcher: Launcher, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    peers = {name: f"sharing.peers.{name}={{file: {tmp_path / name}.share}}" for name in ("near", "far")}
    near = launcher.train("near", *SETTINGS, model(), peers["far"], f"data.hold={hold}")
    far = launcher.train("far", *SETTINGS, model(hidden_size=48, num_hidden_layers=2), peers["near"])
    for run, name in ((near, "near"), (far, "far")):
        admit(run, tmp_path / f"{name}.share")
    wait_until(lambda: shared(near.directory) > 1 and shared(far.directory) > 1, "groups of both in both")

    hold.write_text(str(len(Received(near.directory).others)))
    wait_until(lambda: stands_in_a_step(near, hold), "a step of which only a group of the peer is trained")
    steps = len(near.metrics)
    near.lose_host()
    assert len(near.metrics) == steps, "it was killed in the next step"
    hold.unlink()
    wait_until(lambda: changes(far.directory, "near")[-1] == "lost", "the loss of the peer")
    before = shared(near.directory)
    near = launcher.resume("near")
    near.wait_for_step(steps + 1)
    admit(near, tmp_path / "near.share")
    wait_until(lambda: changes(far.directory, "near")[-1] == "joined", "the peer is there again")
    wait_until(lambda: shared(near.directory) > before + 2, "further groups of the peer")
    for run in (near, far):
        run.signal(signal.SIGINT)
        assert run.wait() == 130, run.text
        assert_each_counts_once(run.directory)
        assert not [event for event in run.events if event.get("state") == "dropped"]
        run.assert_nothing_is_left()


def stands_in_a_step(run: Launched, hold: Path) -> bool:
    """True if the run can't end its step, because its own trajectories wait, and the trainer has computed a group of
    the peer for it. Lets another of its own begin if no group of the peer is there."""
    received, last = Received(run.directory), len(run.metrics)
    if len(received.others) < int(hold.read_text()):
        return False
    of_own = {step for step, _ in received.others}
    if any(step > last and step not in of_own for step, _ in received.trained_groups):
        return True
    hold.write_text(str(len(received.others) + 1))
    return False


def assert_each_counts_once(run: Path) -> None:
    """The names in the newest checkpoint are those of the records, of the figures, and of the trainer's work."""
    newest = max((run / "checkpoints").glob("step_*[0-9]"))
    names = logged_names(newest)
    step = int(newest.name.removeprefix("step_"))
    received = Received(run)
    of_records = Counter(query for of_step, query in received.records if of_step <= step)
    assert of_records == Counter(names)
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [*range(1, step + 1)]
    assert sum(line.get("shared_groups", 0) for line in lines) == len(names)
    # A micro-batch in which all advantages are 0 is not computed: of a group whose rewards differ another one is.
    of_trainer = Counter({sample: count for sample, count in received.trained.items() if sample[0] in names})
    assert {name for name, *_ in of_trainer} == set(names) and set(of_trainer.values()) == {1}


def logged_names(checkpoint: Path) -> list[str]:
    """Those of ``QueriesState.logged``."""
    state = json.loads((checkpoint / "run.json").read_text())
    return [*state["queries"]["logged"]]
