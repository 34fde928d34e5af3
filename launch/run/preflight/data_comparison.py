"""Compares the first training queries with those that another process makes. See ``data_process.py``."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from ...config.run_config import RunConfig
from .trial_words import SWITCH

_PATIENCE_S: Final = 5.0
"""For the other process, after the checks: it has less to do, and what it would find is not worth a long wait."""


class DataComparison:
    """The other process; it ends with the context of ``begin``."""

    def __init__(self, process: "subprocess.Popen[bytes]", directory: Path) -> None:
        self._process = process
        self._directory = directory

    @classmethod
    @contextlib.contextmanager
    def begin(
        cls, config: RunConfig, directory: Path, environment: Mapping[str, str]
    ) -> "Iterator[DataComparison]":
        """``directory``: gets the config and the digests."""
        (directory / "config.json").write_text(config.model_dump_json())
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "flexmarl.launch.run.preflight.data_process", str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        try:
            yield cls(process, directory)
        finally:
            process.kill()
            process.wait()

    def problems(self, digests: Sequence[str]) -> list[str]:
        """``digests``: of the queries as the process of the checks makes them."""
        try:
            status = self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:  # a recipe that takes long
            return []
        if status:
            return []
        remote_digests = json.loads((self._directory / "digests.json").read_text())
        for position, (first, second) in enumerate(zip(digests, remote_digests, strict=False)):
            if first != second:
                return [random_data_problem(position, "in another process")]
        return []


def random_data_problem(position: int, when: str) -> str:
    """``when``: the second call."""
    return (
        f"workflow.py: train_query({position}, seed) gives another query {when}: a run that continues from a "
        "checkpoint would train on other data. Take all that is random from random.Random(f'{seed} {position}'); "
        "hash() of a text and the order of a set differ between processes: take zlib.crc32 and sorted(). "
        f"{SWITCH}"
    )
