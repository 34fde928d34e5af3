"""The address of a run's launcher, in a file for this user alone. With it other programs reach the run.

    tcp://10.0.0.1:41234
    {"server_public": ...}

The second part has the run's keys. A run of one host has none: its address is a socket in a private folder.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from ...core.durable.files import replace_private
from ...core.errors import UnsafeKeys
from ...core.system import ActorSystem
from ...core.wire.curve import Keys, read_private

SCHEMES: Final = ("ipc://", "tcp://")


@dataclass(frozen=True, slots=True)
class RunAddress:
    """``address``: of the launcher's system. ``keys``: None for a run of one host."""

    address: str
    keys: Keys | None

    @classmethod
    def of(cls, system: ActorSystem) -> Self:
        """The address and keys of the launcher's own system, which has been entered."""
        return cls(system.address, system.keys)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises UnsafeKeys if others may have read or written the file, or its content is invalid; OSError."""
        return cls.parse(read_private(path), path)

    @classmethod
    def parse(cls, content: bytes, path: Path) -> Self:
        """``path``: the place that the content comes from, for errors. Raises UnsafeKeys."""
        first, _, keys = content.partition(b"\n")
        address = first.decode(errors="replace")
        if not address.startswith(SCHEMES):
            problem = "its first line is not the address of a run" if content else "it is empty"
            raise UnsafeKeys(
                path, problem, "name runs/NAME/address of a running run, or a file of `flexmarl admit`"
            )
        return cls(address, Keys.from_json(keys, path) if keys else None)

    def text(self) -> str:
        """The content of the file, as ``parse`` reads it. It has the run's secret keys: never to be logged."""
        return self.address + ("" if self.keys is None else f"\n{self.keys.to_json()}")

    @contextlib.contextmanager
    def published(self, path: Path) -> Iterator[None]:
        """Writes the file, and removes it at the end. A killed run leaves it behind."""
        replace_private(path, self.text().encode("ascii"))
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
