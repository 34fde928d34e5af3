"""``flexmarl store`` and columns of a run's own, on real runs whose engines and trainer are simulated."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import fmean, stdev

import pytest

from flexmarl.actors.messages import Selection, StoreApi
from flexmarl.core.errors import FlexmarlError
from flexmarl.core.protocol.session import Settings
from flexmarl.core.system import ActorSystem
from flexmarl.launch.cli.main import main
from flexmarl.launch.config.config_reading import resolve, to_yaml
from flexmarl.launch.monitoring import store_view
from flexmarl.launch.run.connected_run import connect
from flexmarl.launch.run.run import Run
from flexmarl.launch.run_folder.run_directory import RunDirectory

from ...patience import PATIENCE_S
from ..conftest import SIMULATED_POLICIES, TINY, Launched, Launcher, json_lines, wait_until
from ..in_process import RunsHere, run_in_loop

SIMULATED = (
    *SIMULATED_POLICIES,
    "agents.solver.columns={difficulty: {type: float}, plan: {type: tokens}}",
    "data.shape=graded",
)
Flexmarl = Callable[..., tuple[int, str, str]]


@pytest.fixture
def flexmarl(capsys: pytest.CaptureFixture[str]) -> Flexmarl:
    """Status, standard output, standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        return (main(["store", *words]), *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def running(launcher: Launcher) -> Iterator[Launched]:
    """Its first step is trained; the workflows of the second have begun, and wait until ``close``."""
    hold = launcher.runs / "looked-at.hold"
    hold.write_text("2")
    run = launcher.train("looked-at", *SIMULATED, f"data.hold={hold}")
    run.wait_for_step(1)
    yield run
    run.close()


class TestARunningRun:
    def test_is_shown_as_a_table(self, running: Launched, flexmarl: Flexmarl) -> None:
        status, out, err = flexmarl(str(running.directory), "agent = 'solver'")
        assert status == 0 and not err
        assert "1:q000_0_3" in out and "consumed" in out and out.endswith("8 of 8 samples\n")

    def test_is_asked_about_its_own_columns(self, running: Launched, flexmarl: Flexmarl) -> None:
        status, out, _ = flexmarl(str(running.directory), "difficulty > 0.2", "--json")
        found = json.loads(out)
        assert status == 0 and found["total"] == 4
        assert {(row["group"], row["difficulty"], row["agent"]) for row in found["rows"]} == {
            ("1:q001", 1.0, "solver")
        }
        assert "plan" not in found["rows"][0], "what is bulk is not shown"

    def test_a_limit_returns_the_total_too(self, running: Launched, flexmarl: Flexmarl) -> None:
        _, out, _ = flexmarl(str(running.directory), "--limit", "3", "--json")
        found = json.loads(out)
        assert len(found["rows"]) == 3 and found["total"] == 16
        _, out, _ = flexmarl(str(running.directory), "--limit", "3")
        assert out.endswith("3 of 16 samples\n")

    def test_no_rows_are_not_an_error(self, running: Launched, flexmarl: Flexmarl) -> None:
        assert flexmarl(str(running.directory), "reward > 10") == (0, "0 of 0 samples\n", "")

    @pytest.mark.parametrize(
        ("words", "why"),
        [
            (["rewrd > 0.5"], "there is no column rewrd; there are: agent, sample_id"),
            (["reward >"], "the expression 'reward >' is invalid: "),
            (
                ["--trajectory", "q000"],
                "'q000' is neither a sample id, {step}:{query}_{turn}_{trajectory}, nor",
            ),
            (["--trajectory", "1:q000_9"], "neither a sample nor a trajectory '1:q000_9' is in the store"),
            (["reward > 1", "--trajectory", "1:q000_0"], "--trajectory takes no expression"),
            (["--limit", "0"], "0 is not in the range"),
        ],
    )
    def test_an_invalid_expression_is_refused(
        self, running: Launched, flexmarl: Flexmarl, words: list[str], why: str
    ) -> None:
        status, out, err = flexmarl(str(running.directory), *words)
        assert status == 2 and not out and why in err and "Traceback" not in err

    @pytest.mark.parametrize("name", ["1:q001_1_3", "1:q001_0_3", "1:q001_3"])
    def test_a_sample_leads_to_its_trajectory(self, running: Launched, flexmarl: Flexmarl, name: str) -> None:
        status, out, _ = flexmarl(str(running.directory), "--trajectory", name, "--json")
        found = json.loads(out)
        assert status == 0 and found["total"] == 2
        assert [(row["sample_id"], row["agent"], row["difficulty"]) for row in found["rows"]] == [
            ("1:q001_0_3", "solver", 1.0),
            ("1:q001_1_3", "checker", None),
        ]

    def test_a_trajectory_is_shown_as_a_conversation_too(self, running: Launched, flexmarl: Flexmarl) -> None:
        words = (str(running.directory), "--trajectory", "1:q001_3")
        # The record of a trajectory is written up to a second after its step.
        wait_until(lambda: "trajectory 3" in flexmarl(*words)[1], "the recorded trajectory")
        _, out, _ = flexmarl(*words)
        table, _, conversation = out.partition("2 of 2 samples\n")
        assert "1:q001_1_3" in table
        assert "step 1 · query q001 · trajectory 3" in conversation
        assert "solver  turn 0" in conversation and "checker  turn 1" in conversation
        _, out, _ = flexmarl(str(running.directory / "address"), "--trajectory", "1:q001_3")
        assert out.endswith("2 of 2 samples\n"), "the samples are a file of the folder"


def test_a_run_that_has_not_begun(tmp_path: Path, flexmarl: Flexmarl) -> None:
    RunDirectory.create(tmp_path / "new", to_yaml(resolve(str(TINY), [])))
    status, _, err = flexmarl(str(tmp_path / "new"))
    assert status == 2 and "new has no store: has the run begun?" in err
    (tmp_path / "new" / "store").mkdir()
    (tmp_path / "new" / "store" / "samples.journal").write_bytes(b"something else" * 4)
    status, _, err = flexmarl(str(tmp_path / "new"))
    assert status == 2 and "samples.journal can't be read: " in err and "does not begin as a journal" in err
    status, _, err = flexmarl(str(tmp_path))
    assert status == 2 and "is not a run directory" in err


def test_a_table_leaves_out_empty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"sample_id": "1:q[bold]_0_0", "step": 1, "reward": 0.5, "note": None}
    store_view.show(Selection([row], 7))
    out = capsys.readouterr().out
    assert "1:q[bold]_0_0" in out and "note" not in out and "step" not in out and "1 of 7 samples" in out


def test_samples_are_found_by_their_advantage(runs_here: RunsHere, flexmarl: Flexmarl) -> None:
    sizes = "training={steps: 2, queries_per_step: 6, trajectories_per_query: 8, micro_batch: 8}"
    run = runs_here.train(
        "advantages", sizes, "agent_defaults.engine.token_s=1.0e-3", recipe=TINY.parent / "simulated"
    )
    assert run.status == 0, run.text
    status, out, err = flexmarl(str(run.directory), "advantage > 2", "--limit", "1000", "--json")
    assert status == 0 and not err
    found = {row["sample_id"]: row["advantage"] for row in json.loads(out)["rows"]}
    _, out, _ = flexmarl(str(run.directory), "--limit", "1000", "--json")
    groups: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for row in json.loads(out)["rows"]:
        groups.setdefault((row["agent"], row["group"]), []).append((row["sample_id"], row["reward"]))
    expected = {}
    for group in groups.values():
        rewards = [reward for _, reward in group]
        for name, reward in group:
            expected[name] = (reward - fmean(rewards)) / (stdev(rewards) + 1e-4)
    assert found == {name: pytest.approx(value) for name, value in expected.items() if value > 2} != {}
    _, out, _ = flexmarl(str(run.directory), "advantage > 2", "--limit", "1")
    assert " advantage " in out and out.endswith(f"1 of {len(found)} samples\n")


# --------------------------------------------------------------------------- columns that a service writes


JUDGED = "agents.solver.columns.judged={{type: float, required: true, written_by: external, timeout_s: {}}}"


async def judge(run: Run) -> int:
    """Writes ``judged`` of every row that waits for it, until the run has ended; returns how many rows waited."""
    judged = set[str]()
    address: str | None = None
    impatient = Settings(connect_timeout_s=0.5)
    async with asyncio.timeout(PATIENCE_S), ActorSystem("judge", settings=impatient) as system:
        while run.result is None:
            await asyncio.sleep(0.01)
            # The run may be starting, or ending just now.
            with suppress(FlexmarlError):
                if address is None:
                    async with connect(run.directory.path) as connected:
                        address = (await connected._store_ref()).address
                store = system.ref("store", address, StoreApi).within(5)
                rows = (await store.select("status = 'writing'", 1000)).rows
                ids = [row["sample_id"] for row in rows]
                judged.update(ids)  # the answer may be lost, and the row written
                await store.write("judge", {"solver": {"sample_id": ids, "judged": [0.5] * len(ids)}})
    return len(judged)


@pytest.mark.parametrize("mode", ["strict", "async"])
def test_a_run_continues_as_a_judge_writes(tmp_path: Path, flexmarl: Flexmarl, mode: str) -> None:
    settings = ("training.steps=3", f"mode={mode}", JUDGED.format(60))

    async def trained() -> int:
        async with run_in_loop(tmp_path, f"judged-{mode}", *SIMULATED, *settings) as run:
            return await judge(run)

    assert asyncio.run(trained()) == 3 * 8
    folder = tmp_path / f"judged-{mode}"
    assert [line["samples/solver"] for line in json_lines(folder / "metrics.jsonl")] == [8] * 3
    status, out, err = flexmarl(str(folder), "judged = 0.5", "--json")
    assert status == 0 and not err
    found = json.loads(out)
    assert found["total"] == 3 * 8 and {row["status"] for row in found["rows"]} == {"consumed"}
    status, out, _ = flexmarl(str(folder), "--trajectory", "2:q003_1", "--json")
    assert [row["agent"] for row in json.loads(out)["rows"]] == ["solver", "checker"]
    before = (folder / "store" / "samples.journal").read_bytes()
    status, _, err = flexmarl(str(folder), "rewrd > 1")
    assert status == 2 and "there is no column rewrd" in err
    assert (folder / "store" / "samples.journal").read_bytes() == before


def test_a_judge_that_never_comes_ends_the_run_with_its_column(runs_here: RunsHere) -> None:
    run = runs_here.train("unjudged", *SIMULATED, JUDGED.format(0.3))
    assert run.status == 1
    assert "lacks judged, which an external writer has to write" in run.text
    assert "agents.solver.columns.judged.timeout_s" in run.text
