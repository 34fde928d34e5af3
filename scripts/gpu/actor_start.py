"""The processes of actors are forked from one that has imported PyTorch and opened no device, and start fast.

Criteria: the process that forks has opened no ``/dev/nvidia`` and has no thread but its own, so that actors share its
imports; a recipe that calls ``torch.cuda.is_available()`` when it is imported trains. The seconds until all actors are
ready are recorded; if imports have started threads, so are the modules that did.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from flexmarl.launch.config.config_reading import RECIPES, resolve
from flexmarl.launch.hosts import env
from flexmarl.launch.run.actor_specs import modules_of

from .checks import Card, Check, holds
from .trained import TrainRun, check_end, checks_of_part, closing

LIMIT_S = 55.0
"""Less than the limit of the test's row: a run that is late is named."""
_STEP = (
    "training={steps: 1, queries_per_step: 2, trajectories_per_query: 2, micro_batch: 4}",
    "evaluation.every=0", "agent_defaults.sft={batches: 1, batch_size: 4}",
)  # fmt: skip
_PROBE = "import sys; sys.path.append(sys.argv.pop(1)); from scripts.gpu.import_threads import main; main(sys.argv[1:])"
_ROOT = Path(__file__).parents[2]


def run(card: Card) -> Iterator[Check]:
    yield from start_all(card, LIMIT_S * card.limit_factor)


def start_all(card: Card, limit_s: float) -> Iterator[Check]:
    """A plain run and one with the recipe at once, and the imports by themselves. Without a card all is checked of the
    second run: then it differs from the first one in nothing, and seconds are not compared."""
    deadline = time.monotonic() + limit_s
    recipe = _recipe_that_asks(card.folder / "recipe")
    probe = _start_probe()
    asking = TrainRun(card, "asking", recipe, *_STEP)
    plain = TrainRun(card, "plain", "sort-digits", *_STEP) if card.is_cuda else None
    with closing([asking, *([plain] if plain else [])]), probe:
        # First what does not need the ends of the runs: a late end hides none of it.
        yield from checks_of_part("imports", lambda: _name_threads(probe, deadline))
        yield from checks_of_part("forks", lambda: _check_forks(plain or asking, deadline))
        if plain:
            yield from checks_of_part("plain", lambda: _check_run(plain, deadline))
        yield from checks_of_part("recipe that asks for CUDA", lambda: _check_run(asking, deadline))


def _recipe_that_asks(folder: Path) -> Path:
    """The recipe with a question for CUDA at its import."""
    shutil.copytree(RECIPES / "sort_digits", folder)
    file = folder / "workflow.py"
    file.write_text(f"{file.read_text()}\nimport torch\n\nHAS_CUDA = torch.cuda.is_available()\n")
    return folder


def _check_forks(run: TrainRun, deadline: float) -> Iterator[Check]:
    run.wait_for_step(1, deadline)
    text = run.log("fork-server").strip()
    yield holds("devices that the process that forks has open", text or "none", "none", "/dev/" not in text)
    yield holds("log of the process that forks", text or "empty", "empty: actors are forked", not text)


def _check_run(run: TrainRun, deadline: float) -> Iterator[Check]:
    run.wait_for_step(1, deadline)
    yield Check("seconds until all actors were ready", run.seconds_until_ready())
    yield from check_end(run, deadline)


def _start_probe() -> "subprocess.Popen[str]":
    """Imports the same modules as the process that forks, with the same environment."""
    modules = modules_of(resolve("sort-digits", []))
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _PROBE, str(_ROOT), *modules],
        env=env.actor_environment(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def _name_threads(probe: "subprocess.Popen[str]", deadline: float) -> Iterator[Check]:
    try:
        text, _ = probe.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        probe.kill()
        raise
    answer = json.loads(text.splitlines()[-1])
    yield Check("seconds", answer["seconds"])
    for module, additions in answer["causes"]:
        yield Check(f"threads and devices of {module}", ", ".join(additions))
