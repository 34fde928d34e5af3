"""The files of a run, as tests read them: its events and steps, and the samples that it has trained."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .conftest import json_lines
from .in_process import Finished


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind, in their order."""
    return [line for line in json_lines(run / "events.jsonl") if line["event"] == kind]


def step_lines(run: Path) -> list[dict[str, Any]]:
    """The last line of each step: a run that continues from a checkpoint repeats those after it."""
    return [*{line["step"]: line for line in json_lines(run / "metrics.jsonl")}.values()]


def trained_by_version(run: Path, policy: str = "solver") -> dict[str, list[str]]:
    """The ids of the samples that a simulated policy has trained, by its version, as the newest checkpoint has them."""
    newest = max((run / "checkpoints").glob("step_*[0-9]"))
    trained: dict[str, list[str]] = json.loads((newest / policy / "simulated_policy.json").read_text())[
        "trained"
    ]
    return trained


def trained(run: Path, policy: str = "solver") -> Counter[str]:
    """The number of times that each sample was trained."""
    return Counter(name for names in trained_by_version(run, policy).values() for name in names)


def assert_bit_equal(
    run: Finished, other: Finished, steps: int, policies: Iterable[str], measured_names: int
) -> None:
    """Losses, norms of the gradients and rewards of all steps, and the last weights."""

    def measured(run: Finished) -> list[tuple[float, ...]]:
        names = [name for name in run.metrics[0] if name.split("/")[0] in ("loss", "grad_norm", "reward")]
        assert len(names) >= measured_names and len(run.metrics) == steps
        return [tuple(line[name] for name in names) for line in run.metrics]

    assert measured(run) == measured(other)
    for policy in policies:
        file = Path("checkpoints") / f"step_{steps:06d}" / policy / "model.safetensors"
        assert (run.directory / file).read_bytes() == (other.directory / file).read_bytes()
