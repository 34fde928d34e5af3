"""A module that opens a device when it is imported, and keeps it open."""

from pathlib import Path

DEVICE = Path("/dev/full").open("rb", buffering=0)  # noqa: SIM115
