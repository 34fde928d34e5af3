"""Strikes actors of real runs at random, continues each run from its last checkpoint, and counts the trained samples.

\b
Examples:
  scripts/bench/run kill_storm --strikes 200 --seed 1
  scripts/bench/run kill_storm --strikes 100 --faults stop --restarts --clock
  scripts/bench/run kill_storm --strikes 200 --only rollout
  scripts/bench/run kill_storm --strikes 200 --only wide --hosts

Engines and trainer are simulated (they only take time); orchestrator, rollout, store, transport, checkpoints and
processes are the real ones. A run is started; at a random time a random actor (both drawn from the seed) gets kill -9,
or with ``--faults stop`` SIGSTOP for longer than the heartbeats and then SIGCONT: it may have been given up meanwhile.
The run ends with an error that names it, and ``flexmarl train --resume`` continues it; with ``--restarts`` it continues
by itself. After the last strike the run continues to its end. ``--clock`` steps the wall clocks of all processes with
each strike, by up to a day. ``--only`` strikes actors that are restarted alone, ``rollout``, ``instances`` or ``slots``
(the workers of a shared training pool) or several kinds, within one run of several of each of them, which must come to
its end without a restart of the run. ``gangs`` are slots too; their policies have one or two ranks, by the slots that
are free. ``wide`` ones have three or four on four slots, in a process group of gloo that they meet in at each
computation; ``replicas`` are two of two ranks, or one of two to three. With ``--hosts`` slots and instances are spread
over the nodes of two hosts, which are network namespaces (without root both are this one), the head is on the first of
them. Each has two of four slots: wide gangs are on both, and a replica is on each.

The samples in the trainer's checkpoint are compared with those that the workflow must have made: every sample once, and
no others. Prints one JSON object; exits with 1 if a run hung, ended for another reason, or a sample was trained twice
or never.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import click
import psutil
from tests.stepping_clock import SteppingClock

from flexmarl.launch.bench.namespaces import Host, two_hosts

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-c", "import sys; from flexmarl.launch.cli.main import main; sys.exit(main())")
RECIPE = Path(__file__).parent / "pipeline_recipe"
ACTORS = ("store", "trainer", "rollout-0", "orchestrator", "planner-0", "solver-0", "checker-0")
TURNS = {"planner": 1, "solver": 2, "checker": 6}
QUERIES, TRAJECTORIES = 4, 2
# A run without progress for this time hangs: a step takes a fraction of a second, the start some seconds.
PATIENCE_S = 120.0
# After the first step of a life; long enough for many steps.
STRIKE_WITHIN_S = 2.0
# Kills are seen without heartbeats: short ones are for stops. A busy machine may overrun them.
HEARTBEATS = {"heartbeat_s": 0.5, "missed_heartbeats": 4, "silence_s": 3.0}
# The actors that ``--only`` strikes, by their kind, and the settings of a run that has them.
RESTARTED = {
    "rollout": tuple(f"rollout-{number}" for number in range(3)),
    "instances": tuple(f"{policy}-{number}" for policy in TURNS for number in range(2)),
    "slots": tuple(f"slot-{number}" for number in range(2)),
    "gangs": tuple(f"slot-{number}" for number in range(3)),
    "wide": tuple(f"slot-{number}" for number in range(4)),
    "replicas": tuple(f"slot-{number}" for number in range(4)),
}
SEVERAL = {
    "rollout": ("rollout.workers=3",),
    "instances": ("agent_defaults.instances=2",),
    "slots": ("pool={name: shared, slots: 2}",),
    "gangs": (
        "pool={name: shared, slots: 3}",
        "agent_defaults.trainer.ranks=2",
        "agent_defaults.trainer.min_ranks=1",
    ),
    "wide": (
        "pool={name: shared, slots: 4}",
        "agent_defaults.trainer.ranks=4",
        "agent_defaults.trainer.min_ranks=3",
        "agent_defaults.trainer.process_group=true",
    ),
    "replicas": (
        "pool={name: shared, slots: 4}",
        "agent_defaults.trainer.ranks=4",
        "agent_defaults.trainer.replicas=2",
        "agent_defaults.trainer.min_ranks=2",
        "agent_defaults.trainer.process_group=true",
    ),
}
# A call notices a stopped actor within 2 s, the launcher within 4 s. Then it has a few seconds until it is ended.
STOPPED_S = (2.5, 9.0)
DAY_S = 86_400.0


class StormError(Exception):
    """The run or its samples are not as they should be."""


@dataclass(frozen=True)
class Strike:
    """``delay_s``: after a step. ``stopped_s``: until SIGCONT; 0 for a kill. ``clock_s``: new offset of the clocks."""

    actor: str
    delay_s: float
    stopped_s: float
    clock_s: float


@dataclass(frozen=True)
class Life:
    """One process of the run: the actors struck in it, and its exit status."""

    struck: tuple[str, ...]
    status: int


class Storm:
    def __init__(
        self,
        folder: Path,
        steps: int,
        strikes: list[Strike],
        *,
        restarts: bool,
        clock: bool,
        several: Sequence[str] = (),
        hosts: Sequence[Host] = (),
        patience_s: float = PATIENCE_S,
    ) -> None:
        """``several``: kinds of which the run has more than one actor; then no strike may end it. ``hosts``: each has a
        node, and the first one the head. ``patience_s``: a run without progress for this time hangs."""
        self._one_run = bool(several)
        self._several = [setting for kind in several for setting in SEVERAL[kind]]
        if hosts:
            spread = ("hosts.spread=true", f"network={{listen: {hosts[0].address}, bulk: trusted}}")
            self._several += [*spread, "--nodes", str(len(hosts)), "--wait-s", str(patience_s)]
        self._hosts = hosts
        self._patience_s = patience_s
        self._folder = folder
        self._run = folder / "run"
        self._steps = steps
        self._strikes = deque(strikes)
        heartbeats = HEARTBEATS if any(strike.stopped_s for strike in strikes) else {}
        self._supervision = {"max_restarts": 100_000, **heartbeats}
        self._restarts = restarts
        self._clock = SteppingClock(folder) if clock else None

    def blow(self) -> list[Life]:
        """Raises StormError if a run hangs or ends for another reason than a strike."""
        lives: list[Life] = []
        while not lives or lives[-1].status:
            life = self._live()
            lives.append(life)
            print(f"{len(lives)}: struck {life.struck}, status {life.status}", file=sys.stderr, flush=True)
            if life.status not in (0, 1) or (
                life.status and (self._restarts or self._one_run or not life.struck)
            ):
                raise StormError(
                    f"exit status {life.status} after {life.struck} were struck: see {self._output}"
                )
        return lives

    @property
    def _output(self) -> Path:
        return self._folder / "output"

    def _live(self) -> Life:
        struck: list[str] = []
        nodes = [
            self._start(host, "node", "--join", str(self._run / "address"), "--name", f"host-{number}")
            for number, host in enumerate(self._hosts)
        ]
        process = self._start(self._hosts[0] if self._hosts else None, "train", *self._arguments())
        processes = [process, *nodes]
        try:
            while self._strikes and self._progressed(process):
                time.sleep(self._strikes[0].delay_s)  # the random time of the strike
                if self._strike(processes, self._strikes[0]):
                    struck.append(self._strikes.popleft().actor)
            while self._progressed(process):
                pass
            return Life(tuple(struck), process.wait())
        finally:
            for started in processes:
                started.kill()
                started.wait()

    def _start(self, host: Host | None, *arguments: str) -> "subprocess.Popen[bytes]":
        with self._output.open("ab") as output:
            return subprocess.Popen(
                [*(() if host is None else host.command), *COMMAND, *arguments],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def _arguments(self) -> list[str]:
        restarts = ["--restarts", str(len(self._strikes) + 1)] if self._restarts else []
        if self._run.exists():
            return ["--resume", str(self._run), *restarts]
        return [
            str(RECIPE), "--runs", str(self._folder), "--name", self._run.name, *restarts,
            f"training.steps={self._steps}", f"training.queries_per_step={QUERIES}", "training.micro_batch=4",
            f"training.trajectories_per_query={TRAJECTORIES}", "checkpoint.every=1", "checkpoint.keep=2",
            f"supervision={json.dumps(self._supervision)}", *self._several,
        ]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts" / "src"), "OMP_NUM_THREADS": "1"}
        return environment if self._clock is None else self._clock.environment(environment)

    def _strike(self, processes: Sequence["subprocess.Popen[bytes]"], strike: Strike) -> bool:
        """False if that actor does not run: the run has ended, or is being restarted."""
        victims = (_actor(process.pid, strike.actor) for process in processes)
        victim = next((victim for victim in victims if victim is not None), None)
        if victim is None:
            return False
        if self._clock is not None:
            self._clock.step(strike.clock_s)
        with contextlib.suppress(psutil.NoSuchProcess):
            if not strike.stopped_s:
                victim.kill()
                return True
            victim.suspend()
            with contextlib.suppress(psutil.TimeoutExpired):
                victim.wait(strike.stopped_s)
            victim.send_signal(signal.SIGCONT)
        return True

    def _progressed(self, process: subprocess.Popen[bytes]) -> bool:
        """Waits for a step; False if the process has ended. Raises StormError if nothing happens."""
        before, deadline = self._progress(), time.monotonic() + self._patience_s
        while self._progress() == before:
            if process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise StormError(
                    f"nothing happened for {self._patience_s:g} s: see {self._output}\n{_last_lines(self._output)}"
                )
            time.sleep(0.005)
        return True

    def _progress(self) -> int:
        """Bytes of metrics: the number grows with every step, and shrinks when a run is resumed."""
        try:
            return (self._run / "metrics.jsonl").stat().st_size
        except FileNotFoundError:
            return 0


def _actor(launcher: int, name: str) -> psutil.Process | None:
    try:
        processes = psutil.Process(launcher).children(recursive=True)
        return next((p for p in processes if name in " ".join(p.cmdline()).split()), None)
    except psutil.NoSuchProcess:
        return None


def drawn(strikes: int, seed: int, faults: str = "kill", actors: Sequence[str] = ACTORS) -> list[Strike]:
    """``faults``: ``kill``, ``stop``, or ``mixed``: one or the other."""
    rng = random.Random(seed)
    plan = []
    for _ in range(strikes):
        stops = faults == "stop" or (faults == "mixed" and rng.random() < 0.5)
        plan.append(
            Strike(
                rng.choice(actors),
                rng.uniform(0.0, STRIKE_WITHIN_S),
                rng.uniform(*STOPPED_S) if stops else 0.0,
                rng.uniform(-DAY_S, DAY_S),
            )
        )
    return plan


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


def check_losses(run: Path) -> tuple[int, int]:
    """The numbers of groups that were begun again, and of micro-batches that were trained again.

    Raises StormError if the run was restarted, if a trajectory failed, or if a group was begun again without being
    counted.
    """
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    names = Counter(event["event"] for event in events)
    if names["run_started"] != 1 or names["run_resumed"] or names["trajectory_failed"]:
        raise StormError(f"the run was restarted, or a trajectory failed: {dict(names)}")
    lost = sum(int(event["groups"]) for event in events if event["event"] == "worker_lost")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    counted = sum(int(step["restarted_groups"]) for step in steps)
    if lost != counted:
        raise StormError(f"{lost} groups were begun again by the events, {counted} by the metrics")
    repeated = sum(int(event["repeated"]) for event in events if event["event"] == "slot_lost")
    return counted, repeated


def _last_lines(output: Path) -> str:
    return "\n".join(output.read_text(errors="replace").splitlines()[-40:])


def _kinds(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(",")) if text else ()
    if unknown := set(kinds) - RESTARTED.keys():
        raise click.BadParameter(f"unknown {', '.join(unknown)}; there are: {', '.join(RESTARTED)}")
    return kinds


@click.command("kill_storm", help=__doc__)
@click.option("--strikes", type=click.IntRange(1), default=200, show_default=True)
@click.option(
    "--steps", type=click.IntRange(1), help="Steps of the run. Default: three per kill, six per stop."
)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--faults", type=click.Choice(["kill", "stop", "mixed"]), default="kill", show_default=True)
@click.option("--restarts", is_flag=True, help="The run continues by itself.")
@click.option(
    "--only", default="", callback=_kinds, help=f"Kinds of actors, with commas: {', '.join(RESTARTED)}."
)
@click.option("--clock", is_flag=True, help="Step the wall clocks too.")
@click.option("--hosts", is_flag=True, help="With --only: over two hosts.")
@click.option(
    "--patience",
    type=click.FloatRange(1.0),
    default=PATIENCE_S,
    show_default=True,
    help="Seconds without progress after which a run hangs: more on a busy machine.",
)
def kill_storm(
    strikes: int,
    steps: int | None,
    seed: int,
    faults: str,
    restarts: bool,
    only: tuple[str, ...],
    clock: bool,
    hosts: bool,
    patience: float,
) -> int:
    if hosts and not only:
        raise click.UsageError("--hosts wants --only: the loss of another actor would end the run")
    steps = steps or (3 if faults == "kill" else 6) * strikes
    actors = tuple(actor for kind in only for actor in RESTARTED[kind]) or ACTORS
    blows = drawn(strikes, seed, faults, actors)
    started = time.monotonic()
    losses: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder, two_hosts() if hosts else nullcontext(()) as pair:
        run = Path(folder) / "run"
        storm = Storm(
            Path(folder),
            steps,
            blows,
            restarts=restarts,
            clock=clock,
            several=only,
            hosts=pair,
            patience_s=patience,
        )
        try:
            lives = storm.blow()
            samples = check(run, steps)
            if only:
                losses["restarted_groups"], losses["repeated_micro_batches"] = check_losses(run)
        except StormError as error:
            print(f"kill_storm: {error}\n{_last_lines(Path(folder) / 'output')}", file=sys.stderr)
            return 1
    struck = Counter(actor for life in lives for actor in life.struck)
    figures = {"strikes": dict(struck), "processes": len(lives), "steps": steps, "samples": samples, **losses}
    print(json.dumps({**figures, "seconds": round(time.monotonic() - started)}))
    if struck.total() < strikes:
        print(f"kill_storm: the run ended after {struck.total()} strikes: give more --steps", file=sys.stderr)
        return 1
    return 0
