"""Records the run that ``flexmarl page --demo`` shows, launch/monitoring/page/demo_run.tar.gz, from a real run.

    python scripts/demo_run.py

Two policies share a training slot, so that the page has a pool to show. The archive has the files that the page reads,
with a mark in place of the package's folder, which the page puts in again.
"""

import gzip
import io
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

from flexmarl.launch.cli.main import main
from flexmarl.launch.monitoring.page.demo_run import ARCHIVE, NAME, PACKAGE, PACKAGE_MARK

SETTINGS: Final = (
    "training.steps=60",
    "pool.name=shared",
    "pool.slots=1",
    "evaluation.every=20",
    "data.eval_problems=40",
    "samples.steps=3",
    "trace.sample=0.02",
)
FILES: Final = (
    "config.yaml", "metrics.jsonl", "events.jsonl", "samples.sqlite", "trace/names.jsonl", "trace/spans.bin",
)  # fmt: skip
MOST_BYTES: Final = 300_000


def record() -> bytes:
    """Trains, and returns the archive."""
    with tempfile.TemporaryDirectory(prefix="flexmarl-demo-") as runs:
        if main(["train", "sort-digits", "--runs", runs, "--name", NAME, *SETTINGS]) != 0:
            sys.exit("the run has failed")
        return pack(Path(runs) / NAME)


def pack(run: Path) -> bytes:
    """The archive of the files of ``run``, without owners and times of this machine."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in FILES:
            content = (run / name).read_bytes()
            if not name.endswith((".sqlite", ".bin")):
                content = content.replace(str(PACKAGE).encode(), PACKAGE_MARK.encode())
                content = content.replace(str(run).encode(), NAME.encode())
            member = tarfile.TarInfo(f"{NAME}/{name}")
            member.size, member.mode = len(content), 0o600
            archive.addfile(member, io.BytesIO(content))
    return gzip.compress(packed.getvalue(), mtime=0)


if __name__ == "__main__":
    archive = record()
    if len(archive) > MOST_BYTES:
        sys.exit(f"{len(archive)} bytes: record less, at most {MOST_BYTES} are shipped")
    ARCHIVE.write_bytes(archive)
    print(f"{ARCHIVE}: {len(archive)} bytes")
