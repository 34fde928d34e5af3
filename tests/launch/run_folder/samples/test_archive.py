"""The launcher's actor that keeps recorded trajectories: its failures cost records, never the run."""

from pathlib import Path

import pytest

from flexmarl.core.system import ActorSystem
from flexmarl.launch.run_folder.samples.archive import Archive, SamplesConfig
from flexmarl.launch.run_folder.samples.reader import Samples

from .files import compared, record, recorded_run, trajectory

CONFIG = SamplesConfig()


async def test_records_are_readable_when_they_are_answered(tmp_path: Path, system: ActorSystem) -> None:
    run = recorded_run(tmp_path / "run", [record(trajectory(step, 1, 0)) for step in (1, 2, 3)])
    warnings: list[str] = []
    archive = await system.add(Archive(run.samples, CONFIG, 2, warnings.append), "archive")
    assert await archive.api.keep([record(trajectory(4, 1, 0, text="8"))], 3) == 0
    with Samples(run.path) as samples:
        assert [one.step for one in samples.trajectories()] == [1, 2, 4], "step 3 is repeated"
        assert samples.recorded().dropped == 3
    await system.remove("archive")
    assert warnings == [] and not [*run.path.glob("*-wal")]


async def test_a_file_that_can_not_be_opened_costs_the_records(tmp_path: Path, system: ActorSystem) -> None:
    run = recorded_run(tmp_path / "run")
    warnings: list[str] = []
    path = run.path / "missing" / "samples.sqlite"
    archive = await system.add(Archive(path, CONFIG, 0, warnings.append), "archive")
    records = [record(trajectory(1, 1, 0), trajectory(1, 1, 1)), record(trajectory(1, 2, 0))]
    assert await archive.api.keep(records, 0) == 3
    assert len(warnings) == 1 and "trajectories are not recorded" in warnings[0] and str(path) in warnings[0]


async def test_log_probabilities_of_the_trainer_are_kept_beside_them(
    tmp_path: Path, system: ActorSystem
) -> None:
    one = trajectory(4, 1, 0)
    run = recorded_run(tmp_path / "run")
    warnings: list[str] = []
    archive = await system.add(Archive(run.samples, CONFIG, 0, warnings.append), "archive")
    assert await archive.api.keep_compared([compared(one)], 0) == 0
    assert await archive.api.keep([record(one)], 0) == 0
    with Samples(run.path) as samples:
        (found,) = samples.trajectories()
    assert [turn.trainer_logprobs for turn in found.turns] == [pytest.approx((-0.25, 0.24)), (-1.25,)]
    assert await archive.api.keep_compared([b"damaged"], 0) == 1
    await system.remove("archive")
    assert len(warnings) == 1 and "trajectories are not recorded" in warnings[0]


async def test_a_full_file_warns_once(tmp_path: Path, system: ActorSystem) -> None:
    run = recorded_run(tmp_path / "run")
    warnings: list[str] = []
    archive = await system.add(
        Archive(run.samples, SamplesConfig(limit_mib=1), 0, warnings.append), "archive"
    )
    big = [record(trajectory(0, query, 0, evaluation=True, text="ab" * 300_000)) for query in range(2)]
    assert await archive.api.keep(big, 0) == 0, "text shrinks"
    noise = [record(trajectory(0, query, 0, evaluation=True, text=_noise())) for query in range(5, 8)]
    assert await archive.api.keep(noise, 0) > 0
    assert await archive.api.keep(noise, 0) > 0
    assert len(warnings) == 1 and "samples.limit_mib=1" in warnings[0]


def _noise() -> str:
    import random

    return random.Random(1).randbytes(600_000).hex()
