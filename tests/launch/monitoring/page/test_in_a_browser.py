"""The page in a real browser: a headless Chromium, which ``browser/checks.mjs`` drives.

``.ci/run`` installs Chromium and, into ``.cache/browser``, the modules of ``browser/package.json``.
"""

import asyncio
import json
import os
import random
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from flexmarl.actors.messages import Query
from flexmarl.actors.names import PolicyName, Step
from flexmarl.actors.run_events import (
    CheckpointSaved,
    Evaluated,
    InstanceChanged,
    PolicyResumed,
    PolicySuspended,
    RunEvent,
    TrajectoryFailed,
)
from flexmarl.actors.spans import Span
from flexmarl.launch.config.config_reading import resolve, to_yaml
from flexmarl.launch.monitoring.page.frozen_page import write_report
from flexmarl.launch.monitoring.page.server import served_page
from flexmarl.launch.run_folder.json_lines import event_to_json
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.run_folder.samples.sample_file import SampleFile

from ....patience import PATIENCE_S
from ...conftest import SIMULATED_POLICIES, TINY
from ...run_folder.records import record
from ...run_folder.samples.files import NO_LIMIT, compared, recorded_run, trajectory
from ...run_folder.samples.files import record as samples_of
from ..timeline.test_timeline import write
from .folders import STARTED, lines_of, step_line

ROOT = Path(__file__).parents[4]
MODULES = ROOT / ".cache" / "browser"
PICTURES = ROOT / ".cache" / "screenshots"
CHECKS = Path(__file__).with_name("browser") / "checks.mjs"
CHROMIUM = shutil.which("chromium") or ""
NODE = shutil.which("node") or ""
FOLDERS = ("HOME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
"""Variables that name the folders in which Chromium leaves files."""

HOSTILE = (
    "<img src=x onerror=alert(1)><script>alert(2)</script></script><b><i>bold</i></b>"
    "\x1b[2J\u202egnp.exe\u0007${alert(3)}"
)

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and NODE and (MODULES / "node_modules" / "axe-core").is_dir()),
    reason="Chromium, node or .cache/browser are missing: CI=true .ci/run installs them",
)


def events() -> list[dict[str, object]]:
    a, b = PolicyName("sorter"), PolicyName("checker")
    news: list[RunEvent] = [
        InstanceChanged("sorter-0", a, "serving", "it has joined"),
        Evaluated(Step(0), 1.0, {"accuracy": 0.1, "reward/sorter": 0.1}),
        PolicySuspended(a, "slot-0", "no computation is ready", 0, 0.1, "none"),
        PolicyResumed(b, "slot-0", "checker has waited 1 s", 2**20, 0.1, "shm"),
        Evaluated(Step(20), 1.0, {"accuracy": 0.6, "reward/sorter": 0.5}),
        CheckpointSaved(Step(20), "checkpoints/step_000020"),
    ]
    return [STARTED, *(event_to_json(event, 1_000_001.0 + at) for at, event in enumerate(news))]


def run_in(folder: Path, seed: int = 7) -> Path:
    """A run as a recipe leaves it, with 20 steps."""
    records = [
        *(
            samples_of(trajectory(step, step, 0, step / 20), trajectory(step, step, 1))
            for step in range(1, 21)
        ),
        *(samples_of(trajectory(step, 9, 0, 0.5, evaluation=True)) for step in (0, 20)),
    ]
    config = to_yaml(resolve(str(TINY), [*SIMULATED_POLICIES, f"seed={seed}"]))
    directory = recorded_run(folder, records, config)
    path = directory.path
    file = SampleFile(directory.samples, 50, NO_LIMIT)
    file.add_compared([compared(trajectory(step, step, 0), by=0.125) for step in range(1, 21)])
    file.close()
    at_s = 1_000_001.0
    write(
        RunDirectory(path),
        Span(
            "rollout-0 turns", "turn", at_s, at_s + 9, "q7", "solver", "solver", trajectory=0, turn=0, step=7
        ),
        *(
            Span(
                "solver-0", "generate", at_s + number, at_s + number + 0.5, "q7", policy="solver", turn=number
            )
            for number in range(8)
        ),
        *(Span("orchestrator", "step", at_s + 3 * step, at_s + 3 * step + 2, step=step) for step in range(3)),
    )
    chance = random.Random(seed)
    steps = [record(step) | {"reward/sorter": chance.random()} for step in range(1, 21)]
    (path / "metrics.jsonl").write_text(lines_of(steps))
    (path / "events.jsonl").write_text(lines_of(events()))
    return path


def hostile_run(folder: Path) -> Path:
    long = HOSTILE + "x" * 1_000_000
    one = trajectory(1, 1, 0, text=long)._replace(query=Query(HOSTILE, HOSTILE), metrics={HOSTILE: 1.0})
    path = recorded_run(folder, [samples_of(one)], "recipe: r\n").path
    (path / "metrics.jsonl").write_text(
        lines_of(
            [step_line(1, {f"workflow/{HOSTILE}": 1.0, f"reward/{HOSTILE}": 0.5, f"loss/{HOSTILE}": 1.0})]
        )
    )
    failed = event_to_json(TrajectoryFailed(Step(1), HOSTILE, long, long))
    (path / "events.jsonl").write_text(lines_of([STARTED, failed, {"event": HOSTILE, HOSTILE: HOSTILE}]))
    return path


def torn_run(folder: Path) -> Path:
    path = recorded_run(folder, [], "recipe: r\n  : [torn").path
    (path / "metrics.jsonl").write_bytes(b'{"step": 1, "time_s": 1.0, "step_s"\n\xff\xfe\n{"step": 2, "ti')
    (path / "events.jsonl").write_bytes(b"[" * 5000)
    (path / "samples.sqlite").write_bytes(b"SQLite format 3\0 and no more")
    return path


async def test_the_page_in_chromium(tmp_path: Path) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    live, second = run_in(tmp_path / "first"), run_in(tmp_path / "second", seed=8)
    pages = {
        "live": [live],
        "two": [run_in(tmp_path / "other"), second],
        "hostile": [hostile_run(tmp_path / "hostile")],
        "torn": [torn_run(tmp_path / "torn")],
    }
    addresses = {"frozen": write_report(second).as_uri()}
    async with AsyncExitStack() as stack:
        for name, paths in pages.items():
            addresses[name] = await stack.enter_async_context(served_page(paths, "127.0.0.1:0"))
        # Not pytest's folder: the path of a socket in it may have a hundred characters.
        home = stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True))
        status, output = await checked(addresses, live, home)
    assert status == 0 and "FAILS" not in output, output


async def checked(addresses: dict[str, str], live: Path, home: str) -> tuple[int, str]:
    """The status and the output of the checks. The run grows when they ask for it."""
    process = await asyncio.create_subprocess_exec(
        NODE, str(CHECKS), str(MODULES), str(PICTURES), json.dumps(addresses),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "FLEXMARL_CHROMIUM": CHROMIUM, **dict.fromkeys(FOLDERS, home)},
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    try:
        async with asyncio.timeout(2 * PATIENCE_S):
            async for line in process.stdout:
                lines.append(line.decode())
                if line.strip() == b"GROW":
                    with (live / "metrics.jsonl").open("a") as file:
                        file.write(lines_of([record(21) | {"reward/sorter": 5.0}]))
            return await process.wait(), "".join(lines)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
