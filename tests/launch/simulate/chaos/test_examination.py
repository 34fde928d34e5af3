"""Cases are played; defects that are planted in the product are found, and failures are shrunk."""

import asyncio
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.inference.engines.engine import LoadTimes
from flexmarl.actors.inference.engines.simulated_engine import SimulatedEngine
from flexmarl.actors.inference.router.cut_links import CutLinks
from flexmarl.actors.messages import Sample, StepStats
from flexmarl.actors.orchestrator import checkpoint
from flexmarl.actors.rollout.rollout import Rollout
from flexmarl.actors.store.writers import Writers
from flexmarl.actors.trainer.backends.policy_backend import MicroBatchStats
from flexmarl.actors.trainer.backends.simulated_policy import SimulatedPolicy
from flexmarl.actors.trainer.pool.rank_memory import RankMemory
from flexmarl.actors.trainer.trainer import Trainer
from flexmarl.core.durable.record_file import RecordFile
from flexmarl.core.testing.memory_node import MemoryNode
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.run import resuming
from flexmarl.launch.run.resuming import StartState
from flexmarl.launch.run.stalls.watch import StallWatch
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.simulate.chaos import outcome as outcome_module
from flexmarl.launch.simulate.chaos.chaos_case import ChaosCase, draw_case
from flexmarl.launch.simulate.chaos.checks import CHECKS, problems_of
from flexmarl.launch.simulate.chaos.examination import examine
from flexmarl.launch.simulate.chaos.outcome import Outcome, outcome_of, play_without_faults
from flexmarl.launch.simulate.chaos.saved_policies import SavedPolicy
from flexmarl.launch.simulate.simulated_faults import FaultKind, PlannedFault
from flexmarl.launch.simulate.simulation import Simulation, simulate

accumulate, optimizer_step = SimulatedPolicy.accumulate, SimulatedPolicy.optimizer_step
plan_resume = resuming.plan_resume
rollout_starts, kill, load = Rollout.on_start, MemoryNode.kill, SimulatedEngine.load
commit = Trainer._commit


@pytest.fixture(autouse=True)
def a_trainer_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of outcomes are tried: the trainer's own check, which has tests elsewhere, would end most of these
    runs before their outcome."""
    monkeypatch.setattr(Trainer, "_check_whole", lambda *_: None)


def case_of(*faults: PlannedFault, **settings: Any) -> ChaosCase:
    """A small strict run that saves every step. ``settings``: in place of its own."""
    case = draw_case(2)
    small = {
        "mode": "strict",
        "deterministic": False,
        "training": {"steps": 3, "queries_per_step": 2, "trajectories_per_query": 2, "micro_batch": 2},
        "checkpoint": {"every": 1, "keep": 2},
    }
    drawn = {key: value for key, value in case.settings.items() if key != "max_staleness"}
    return replace(case, settings=drawn | small | settings, hosts=2, faults=faults)


def shared_slot_case() -> ChaosCase:
    """A strict run of several policies that take turns on one slot, on one host: most are suspended in mid-step."""
    drawn = next(case for case in map(draw_case, range(1000)) if _share_a_slot(case.config()))
    settings = {
        **drawn.settings,
        "training": {"steps": 3, "queries_per_step": 4, "trajectories_per_query": 2, "micro_batch": 1},
        "policies": {
            name: {**policy, "trainer": {**policy["trainer"], "micro_batch_s": 0.1}}
            for name, policy in drawn.settings["policies"].items()
        },
    }
    return replace(drawn, settings=settings, hosts=1, faults=())


def _share_a_slot(config: RunConfig) -> bool:
    pool = config.pool
    return config.mode == "strict" and len(config.policies) > 1 and pool.name == "shared" and pool.slots == 1


_EXPECTED: dict[str, Mapping[str, SavedPolicy]] = {}


def play(case: ChaosCase, folder: Path) -> Outcome:
    """Cases that differ in their faults alone share the run without faults."""
    key = repr(replace(case, faults=()))
    if key not in _EXPECTED:
        _EXPECTED[key] = play_without_faults(case, folder / "without")
    return outcome_of(case, folder / "run", _EXPECTED[key])


def fault(kind: FaultKind, at_s: float) -> PlannedFault:
    return PlannedFault(at_s, kind, 0.3, 0.0)


def train_first_twice(policy: SimulatedPolicy, batch: Sequence[Sample]) -> MicroBatchStats:
    stats = accumulate(policy, batch)
    policy._accumulated.append(batch[0].sample_id)
    return stats


def leave_out_last(policy: SimulatedPolicy, batch: Sequence[Sample]) -> MicroBatchStats:
    stats = accumulate(policy, batch)
    policy._accumulated.pop()
    return stats


def change_rewards(policy: SimulatedPolicy, batch: Sequence[Sample]) -> MicroBatchStats:
    return accumulate(policy, [replace(sample, reward=sample.reward + 1.0) for sample in batch])


def train_for_version_before(policy: SimulatedPolicy, run_step: int | None = None) -> StepStats:
    stats = optimizer_step(policy, run_step)
    policy.trained[policy.version - 1] = [f"9{sample}" for sample in policy.trained[policy.version - 1]]
    return stats


async def leave_a_task(worker: Rollout) -> None:
    await rollout_starts(worker)
    leaked.append(asyncio.create_task(asyncio.sleep(1e6), name="leaked"))


leaked: list[asyncio.Task[None]] = []


async def load_slowly(engine: SimulatedEngine, *arguments: Any, **options: Any) -> LoadTimes:
    await asyncio.sleep(6.0)
    return await load(engine, *arguments, **options)


async def wait_for_nothing(*_: Any) -> None:
    """Does not wait for the commit."""


async def commit_late(trainer: Trainer, *arguments: Any) -> None:
    await asyncio.sleep(0.5)
    await commit(trainer, *arguments)


def fail(*_: Any) -> Any:
    raise ValueError("a defect")


async def name_nothing(*_: Any) -> tuple[str, ...]:
    return ("no actor names a wait; `flexmarl logs RUN` may have more",)


def resume_without_newest(directory: RunDirectory, *arguments: Any) -> StartState:
    for folder in checkpoint.complete(directory.checkpoints)[-1:]:
        shutil.rmtree(folder)
    return plan_resume(directory, *arguments)


DEFECTS: dict[str, list[tuple[Any, str, Any]]] = {
    "ends": [(SimulatedPolicy, "accumulate", fail)],
    "names its waits": [(SimulatedEngine, "load", load_slowly), (StallWatch, "ask", name_nothing)],
    "leaves nothing": [(Rollout, "on_start", leave_a_task)],
    "trains once": [(SimulatedPolicy, "accumulate", train_first_twice)],
    "trains all": [(SimulatedPolicy, "accumulate", leave_out_last)],
    "has all versions": [(SimulatedPolicy, "optimizer_step", train_for_version_before)],
    "has equal sums": [(SimulatedPolicy, "accumulate", change_rewards)],
    "loses no write": [(RecordFile, "append", lambda *_: None)],
    "commits before checkpoints": [
        (Trainer, "_wait_committed", wait_for_nothing),
        (Trainer, "_commit", commit_late),
    ],
    "keeps checkpoints": [(resuming, "plan_resume", resume_without_newest)],
}

SETTINGS: dict[str, dict[str, Any]] = {
    "commits before checkpoints": {"pool": {"name": "shared", "slots": 2}},
    # A load of six seconds is long: with the usual thirty all heartbeats of minutes are simulated.
    "names its waits": {
        "supervision": {"heartbeat_s": 0.5, "missed_heartbeats": 2, "max_restarts": 200, "stall_s": 2.0}
    },
}
NO_DEFECT_AND_ONE = pytest.mark.parametrize(
    "defect", [None, lambda *_: None], ids=["without a defect", "with a defect"]
)


def plant(monkeypatch: pytest.MonkeyPatch, *defects: tuple[Any, str, Any]) -> None:
    """The run under faults has the defects, and the run beside it has not."""

    def simulate_with_defects(config: Any, folder: Path, *arguments: Any, **options: Any) -> Simulation:
        with monkeypatch.context() as patch:
            for owner, name, value in defects if folder.name == "run" else ():
                patch.setattr(owner, name, value)
            return simulate(config, folder, *arguments, **options)

    monkeypatch.setattr(outcome_module, "simulate", simulate_with_defects)


def test_a_case_without_defects_is_clean(tmp_path: Path) -> None:
    outcome = play(case_of(fault(FaultKind.KILL, 0.5), fault(FaultKind.FATAL_KILL, 1.0)), tmp_path)
    assert problems_of(outcome) == [] and len(outcome.injected) == 2 and outcome.seconds > 0.0
    assert outcome.saved == outcome.expected and outcome.saved


def test_a_run_that_begins_on_a_full_disk_waits_for_room(tmp_path: Path) -> None:
    full = PlannedFault(0.0, FaultKind.FULL_DISK, 1.5, 0.0)
    outcome = play(case_of(full), tmp_path)
    assert problems_of(outcome) == [] and outcome.seconds > 1.5
    assert {"store_blocked", "store_unblocked"} <= {event["event"] for event in outcome.events}


def test_every_check_has_a_defect() -> None:
    assert DEFECTS.keys() == CHECKS.keys()


@pytest.mark.parametrize("check", DEFECTS)
def test_a_check_finds_a_defect_of_the_product(
    check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, *DEFECTS[check])
    late = fault(FaultKind.FATAL_KILL, 4.0)  # behind the first checkpoint
    assert check in {
        problem.check for problem in problems_of(play(case_of(late, **SETTINGS.get(check, {})), tmp_path))
    }


def test_turns_that_are_drawn_by_other_weights_than_their_version_says_change_the_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def acknowledge_alone(*_: Any, **__: Any) -> LoadTimes:
        return LoadTimes(0.0, 0.0)

    plant(monkeypatch, (SimulatedEngine, "load", acknowledge_alone))
    problems = problems_of(play(case_of(), tmp_path))
    assert [problem.check for problem in problems] == ["has equal sums"]


@NO_DEFECT_AND_ONE
def test_a_writer_that_may_put_after_its_end_is_a_lost_write(
    defect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, *([(Writers, "retire", defect)] if defect else []))
    of_a_worker = PlannedFault(0.5, FaultKind.KILL, 0.3, 0.9)
    outcome = play(case_of(of_a_worker), tmp_path)
    assert "worker_lost" in {event["event"] for event in outcome.events}
    assert [problem.check for problem in problems_of(outcome)] == (["loses no write"] if defect else [])


@NO_DEFECT_AND_ONE
def test_a_lost_step_that_is_not_rolled_back_is_trained_twice(
    defect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, *([(RankMemory, "step_was_lost", defect)] if defect else []))
    # Slots are the last role.
    losses = [PlannedFault(0.9 + 1.1 * number, FaultKind.KILL, 0.0, 0.99) for number in range(8)]
    case = replace(shared_slot_case(), faults=tuple(losses))
    outcome = play(case, tmp_path)
    assert {fault.target.partition("/")[2] for fault in outcome.injected} == {"slot-0"}
    problems = [problem.check for problem in problems_of(outcome)]
    assert problems[:1] == (["trains once"] if defect else [])


@NO_DEFECT_AND_ONE
def test_a_link_that_is_never_at_fault_costs_the_run_its_turns(
    defect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, *([(CutLinks, "lost", defect)] if defect else []))
    cut = PlannedFault(0.2, FaultKind.CUT_NODES, math.inf, 0.0)
    policies = {name: {**policy, "instances": 1} for name, policy in case_of().settings["policies"].items()}
    case = case_of(cut, policies=policies, rollout={"workers": 2, "turn_retries": 200})
    outcome = play(replace(case, hosts=3), tmp_path)
    assert [problem.check for problem in problems_of(outcome)] == (["ends"] if defect else [])


def test_a_failure_is_shrunk_to_the_fault_that_causes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill_and_break(node: MemoryNode, actor: str) -> None:
        kill(node, actor)
        monkeypatch.setattr(SimulatedPolicy, "accumulate", train_first_twice)

    def examined(case: ChaosCase, folder: Path, expected: Any) -> Outcome:
        monkeypatch.setattr(SimulatedPolicy, "accumulate", accumulate)
        return outcome_of(case, folder, expected)

    monkeypatch.setattr(MemoryNode, "kill", kill_and_break)
    monkeypatch.setattr("flexmarl.launch.simulate.chaos.examination.outcome_of", examined)
    kinds = (FaultKind.SLOW, FaultKind.FREEZE, FaultKind.KILL, FaultKind.SLOW)
    failure = examine(case_of(*(fault(kind, 0.4 + 0.1 * place) for place, kind in enumerate(kinds))))
    assert failure is not None and failure.faults == (2,)
    assert failure.command == "flexmarl simulate --chaos-seed 2 --faults 2"
    assert "fault 2: kill at 0.600 s" in failure.text() and failure.problems[0].check == "trains once"
