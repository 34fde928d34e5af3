"""Kills actors of real runs at random, resumes each run from its last checkpoint, and counts the trained samples.

    .venv/bin/python scripts/bench/kill_storm.py --kills 200 --seed 1

Engines and trainer are simulated (they only take time); orchestrator, rollout, store, transport, checkpoints and
processes are the real ones. A run is started; at a random time a random actor (both drawn from the seed) gets kill -9;
the run ends with an error that names it, and ``flexmarl train --resume`` continues it. After the last kill the run
continues to its end. The samples in the trainer's checkpoint are compared with those that the workflow must have made:
every sample once, and no others. Prints one JSON object; exits with 1 if a run hung, ended for another reason, or a
sample was trained twice or never.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "launch" / "bench" / "pipeline_recipe"
ACTORS = ("store", "trainer", "rollout", "orchestrator", "planner-0", "solver-0", "checker-0")
TURNS = {"planner": 1, "solver": 2, "checker": 6}
QUERIES, TRAJECTORIES = 4, 2
# A run without progress for this time hangs: a step takes a fraction of a second, the start some seconds.
PATIENCE_S = 120.0
# After the first step of a life; long enough for many steps.
KILL_WITHIN_S = 2.0


class StormError(Exception):
    """The run or its samples are not as they should be."""


@dataclass(frozen=True)
class Life:
    """One process of the run: the actor killed in it (None if the run came to its end), and its exit status."""

    killed: str | None
    status: int


def storm(folder: Path, kills: int, steps: int, seed: int) -> list[Life]:
    """Raises StormError if a run hangs or ends for another reason than the kill."""
    rng = random.Random(seed)
    lives: list[Life] = []
    run = folder / "run"
    while True:
        wanted = rng.choice(ACTORS) if len(lives) < kills else None
        life = _live(folder, run, wanted, rng.uniform(0.0, KILL_WITHIN_S), steps)
        lives.append(life)
        print(f"{len(lives)}: killed {life.killed}, exit status {life.status}", file=sys.stderr, flush=True)
        if life.killed is None:
            return lives


def _live(folder: Path, run: Path, victim: str | None, delay_s: float, steps: int) -> Life:
    settings = [
        f"training.steps={steps}", f"training.queries_per_step={QUERIES}", "training.micro_batch=4",
        f"training.trajectories_per_query={TRAJECTORIES}", "checkpoint.every=1", "checkpoint.keep=2",
    ]  # fmt: skip
    begin = [str(RECIPE), "--runs", str(folder), "--name", run.name, *settings]
    arguments = ["--resume", str(run)] if run.exists() else begin
    command = [sys.executable, "-c", "import sys; from flexmarl.launch.cli import main; sys.exit(main())"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts" / "src"), "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("ab") as output:
        process = subprocess.Popen(
            [*command, "train", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        killed = None if victim is None else _kill(process, run, victim, delay_s)
        status = _ended(process, run)
    finally:
        process.kill()
        process.wait()
    if (killed is None and status != 0) or (killed is not None and status not in (0, 1)):
        raise StormError(f"exit status {status} after {killed} was killed: see {folder / 'output'}")
    return Life(killed if status else None, status)


def _kill(process: subprocess.Popen[bytes], run: Path, victim: str, delay_s: float) -> str | None:
    """Kills ``victim`` and returns its name; None if the run had ended before."""
    before = _progress(run)
    deadline = time.monotonic() + PATIENCE_S
    while _progress(run) == before:  # until the first step of this life
        if process.poll() is not None:
            return None
        if time.monotonic() > deadline:
            raise StormError(f"no step within {PATIENCE_S:g} s of the start")
        time.sleep(0.005)
    time.sleep(delay_s)  # the random time of the kill
    try:
        for child in psutil.Process(process.pid).children():
            if victim in child.cmdline():
                child.kill()
                return victim
    except psutil.NoSuchProcess:
        pass
    return None


def _ended(process: subprocess.Popen[bytes], run: Path) -> int:
    seen, deadline = _progress(run), time.monotonic() + PATIENCE_S
    while True:
        try:
            return process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            pass
        if (now := _progress(run)) != seen:
            seen, deadline = now, time.monotonic() + PATIENCE_S
        elif time.monotonic() > deadline:
            raise StormError(f"nothing happened for {PATIENCE_S:g} s") from None


def _progress(run: Path) -> int:
    """Bytes of metrics: the number grows with every step, and shrinks when a run is resumed."""
    try:
        return (run / "metrics.jsonl").stat().st_size
    except FileNotFoundError:
        return 0


def check(run: Path, steps: int) -> int:
    """The number of trained samples. Raises StormError unless each was trained once."""
    newest = sorted((run / "checkpoints").iterdir())[-1]
    total = 0
    for agent, turns in TURNS.items():
        trained = json.loads((newest / agent / "simulated_policy.json").read_text())["trained"]
        counted = Counter(sample for ids in trained.values() for sample in ids)
        twice = [sample for sample, times in counted.items() if times > 1]
        wrong = [
            s for version, ids in trained.items() for s in ids if int(s.split(":")[0]) != int(version) + 1
        ]
        expected = steps * QUERIES * TRAJECTORIES * turns
        if twice or wrong or len(counted) != expected:
            raise StormError(
                f"{agent}: {len(counted)} of {expected} samples were trained, {len(twice)} twice ({twice[:3]}), "
                f"{len(wrong)} in another step than their own ({wrong[:3]})"
            )
        total += expected
    return total


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, help="steps of the run; default: three per kill")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    steps = options.steps or 3 * options.kills
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            lives = storm(Path(folder), options.kills, steps, options.seed)
            samples = check(Path(folder) / "run", steps)
        except StormError as error:
            print(f"kill_storm: {error}", file=sys.stderr)
            return 1
    victims = Counter(life.killed for life in lives if life.killed)
    print(
        json.dumps(
            {
                "kills": dict(victims),
                "steps": steps,
                "samples": samples,
                "seconds": round(time.monotonic() - started),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
