"""A file of recorded trajectories that is locked, read-only, full or damaged: records are lost, and nothing else."""

import asyncio
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from flexmarl.core.system import ActorSystem
from flexmarl.launch.run_folder.samples import archive as archive_module
from flexmarl.launch.run_folder.samples.archive import Archive, SamplesConfig
from flexmarl.launch.run_folder.samples.reader import Samples

from ....full_disk import room_for
from .files import record, recorded_run, trajectory

ROOT = Path(__file__).parents[4]
CONFIG = SamplesConfig()
SEEDS = range(20)

# A host program with an archive, which ends while another connection has locked the file.
LOCKED = f"""
import asyncio, faulthandler, random, sqlite3, sys, threading
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from flexmarl.core.system import ActorSystem
from flexmarl.launch.run_folder.samples.archive import Archive, SamplesConfig
from tests.launch.run_folder.samples.files import record, recorded_run, trajectory

faulthandler.enable()

async def host(folder, chance):
    run = recorded_run(folder)
    async with ActorSystem("host") as system:
        archive = await system.add(Archive(run.samples, SamplesConfig(), 0, print), "archive")
        reader = sqlite3.connect(run.samples, check_same_thread=False)
        reader.execute("BEGIN EXCLUSIVE")
        leaving = threading.Timer(chance.uniform(0, 0.4), reader.close)
        leaving.start()
        keeping = asyncio.create_task(archive.api.keep([record(trajectory(1, 1, 0))], 0))
        await asyncio.sleep(chance.uniform(0, 0.1))
    await asyncio.gather(keeping, return_exceptions=True)
    leaving.join()

for seed in range(20):
    asyncio.run(host(Path(sys.argv[1]) / str(seed), random.Random(seed)))
print("ended well")
"""


def steps_in(run: Path) -> list[int]:
    with Samples(run) as samples:
        return [one.step for one in samples.trajectories()]


def python(program: str, *arguments: str, before: tuple[str, ...] = ()) -> str:
    ended = subprocess.run(
        [*before, sys.executable, "-P", "-X", "faulthandler", "-c", program, *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, f"{ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def test_a_program_that_ends_while_the_file_is_locked_does_not_crash(tmp_path: Path) -> None:
    assert python(LOCKED, str(tmp_path)).endswith("ended well\n")


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_lock_delays_a_record(tmp_path: Path, system: ActorSystem, seed: int) -> None:
    run = recorded_run(tmp_path / "run")
    warnings: list[str] = []
    archive = await system.add(Archive(run.samples, CONFIG, 0, warnings.append), "archive")
    reader = sqlite3.connect(run.samples)
    reader.execute("BEGIN EXCLUSIVE")
    keeping = asyncio.create_task(archive.api.keep([record(trajectory(1, 1, 0))], 0))
    await asyncio.sleep(random.Random(seed).uniform(0, 0.05))
    assert not keeping.done()
    reader.close()
    assert await keeping == 0 and warnings == []
    assert steps_in(run.path) == [1]


async def test_a_lock_that_stays_costs_records_and_says_so(
    tmp_path: Path, system: ActorSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "LOCK_PATIENCE_S", 0.0)
    run = recorded_run(tmp_path / "run", [record(trajectory(9, 1, 0))])
    reader = sqlite3.connect(run.samples)
    reader.execute("BEGIN EXCLUSIVE")
    warnings: list[str] = []
    archive = await system.add(Archive(run.samples, CONFIG, 1, warnings.append), "archive")
    assert warnings == []
    assert [await archive.api.keep([record(trajectory(2, 1, 0))], 0) for _ in range(2)] == [1, 1]
    assert len(warnings) == 1 and "database is locked" in warnings[0] and str(run.samples) in warnings[0]
    reader.close()
    assert await archive.api.keep([record(trajectory(3, 1, 0))], 0) == 0
    assert warnings[1:] == [f"trajectories are recorded again: {run.samples}"]
    await archive.api.keep([record(trajectory(4, 1, 0))], 0)
    await system.remove("archive")
    assert steps_in(run.path) == [3, 4], "the step that is repeated is removed once, though late"


READ_ONLY = f"""
import asyncio, faulthandler, subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from flexmarl.core.system import ActorSystem
from flexmarl.launch.run_folder.samples.archive import Archive, SamplesConfig
from tests.launch.run_folder.samples.files import record, recorded_run, trajectory

faulthandler.enable()
folder = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)
run = recorded_run(folder / "run")

def mount(how):
    subprocess.run(["mount", "-o", f"remount,{{how}}", folder], check=True)

async def host():
    async with ActorSystem("host") as system:
        archive = await system.add(Archive(run.samples, SamplesConfig(), 0, print), "archive")
        for step in (1, 2, 3):
            print(await archive.api.keep([record(trajectory(step, 1, 0))], 0))
            if step == 2:
                mount("rw")

mount("ro")
asyncio.run(host())
mount("ro")
asyncio.run(host())
"""


@pytest.mark.skipif(
    subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    ).returncode
    != 0,
    reason="needs a mount namespace of its own",
)
def test_a_file_on_a_read_only_disk_is_written_when_it_can_be(tmp_path: Path) -> None:
    lines = python(READ_ONLY, str(tmp_path), before=("unshare", "-rm")).splitlines()
    refused, first, second, again, third = lines[:5]
    assert "trajectories are not recorded" in refused and "Read-only file system" in refused
    assert (first, second, third) == ("1", "1", "0") and "recorded again" in again


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_full_disk_costs_the_records_that_find_no_room(
    tmp_path: Path, system: ActorSystem, seed: int
) -> None:
    chance = random.Random(seed)
    run = recorded_run(tmp_path / "run")
    warnings: list[str] = []
    archive = await system.add(Archive(run.samples, CONFIG, 0, warnings.append), "archive")
    kept = []
    with room_for(chance.randrange(0, 100_000)):
        for step in range(1, 8):
            text = chance.randbytes(20_000).hex()
            if await archive.api.keep([record(trajectory(step, 1, 0, text=text))], 0) == 0:
                kept.append(step)
    assert "trajectories are not recorded" in warnings[0]
    assert await archive.api.keep([record(trajectory(8, 1, 0))], 0) == 0
    assert ["again" in text for text in warnings] == [n % 2 == 1 for n in range(len(warnings))]
    assert "again" in warnings[-1]
    await system.remove("archive")
    assert steps_in(run.path) == [*kept, 8]


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_file_that_is_damaged_meanwhile_makes_room_for_another(
    tmp_path: Path, system: ActorSystem, seed: int
) -> None:
    chance = random.Random(seed)
    run = recorded_run(tmp_path / "run", [record(trajectory(1, 1, number)) for number in range(8)])
    warnings: list[str] = []
    damaged_before = seed % 2 == 0
    if damaged_before:
        damage(run.samples, chance)
    archive = await system.add(Archive(run.samples, CONFIG, 1, warnings.append), "archive")
    if not damaged_before:
        damage(run.samples, chance)
    for step in (2, 3, 4):
        await archive.api.keep([record(trajectory(step, 1, 0, text=chance.randbytes(20_000).hex()))], 0)
    await system.remove("archive")
    aside = run.samples.with_name("samples.sqlite.damaged")
    assert aside.exists() == any(aside.name in text for text in warnings)
    if aside.exists():
        assert steps_in(run.path)[-1] == 4


def damage(file: Path, chance: random.Random) -> None:
    """Writes over a few hundred bytes, or cuts the file."""
    data = bytearray(file.read_bytes())
    at = chance.randrange(len(data))
    if chance.random() < 0.3:
        file.write_bytes(data[:at])
        return
    noise = chance.randbytes(min(300, len(data) - at))
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(noise)
