"""The checks of a test, and the card that it runs on."""

import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

Value = float | int | str | bool | None


@dataclass(frozen=True, slots=True)
class Check:
    """One result of a test. ``criterion``: as text, empty for a value that is only recorded. ``passed``: None if it is
    only recorded, or was left out for the reason in ``value``."""

    name: str
    value: Value
    unit: str = ""
    criterion: str = ""
    passed: bool | None = None

    def plain(self) -> dict[str, Any]:
        """The fields by name, floats with four digits."""
        fields = asdict(self)
        if isinstance(self.value, float):
            fields["value"] = float(f"{self.value:.4g}")
        return fields

    @property
    def verdict(self) -> str:
        return {True: "passed", False: "FAILED", None: ""}[self.passed]


Checks = Iterator[Check] | AsyncIterator[Check]


def at_most(name: str, value: float, bound: float, unit: str = "") -> Check:
    """A check that passes up to ``bound``."""
    return Check(name, value, unit, f"<= {shown(bound, unit)}", value <= bound)


def at_least(name: str, value: float, bound: float, unit: str = "") -> Check:
    """A check that passes from ``bound`` on."""
    return Check(name, value, unit, f">= {shown(bound, unit)}", value >= bound)


def holds(name: str, value: Value, criterion: str, passed: bool) -> Check:
    """A check of another criterion. ``value``: shown."""
    return Check(name, value, "", criterion, passed)


def shown(value: Value, unit: str = "") -> str:
    """The value with its unit: bytes in GB or MB, floats with four digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if unit == "bytes" and isinstance(value, int | float):
        return f"{value / 1e9:.4g} GB" if abs(value) >= 1e8 else f"{value / 1e6:.4g} MB"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"{text} {unit}".strip()


def failure(name: str, error: Exception) -> Check:
    """The failed check of an error, whose traceback is printed to the output of the test."""
    traceback.print_exception(error)
    return Check(name, f"{type(error).__name__}: {error}"[:500], "", "without an error", False)


class LeftOut(Exception):
    """The machine lacks something that a test needs: the test is left out, neither passed nor failed."""


@dataclass(frozen=True)
class Card:
    """The device of a test, by PyTorch's name, and a private folder for its files, empty at the beginning.
    ``limit_factor``: for the limits that a test has for its parts, on a slow machine."""

    device: str
    folder: Path
    limit_factor: float = 1.0

    @property
    def is_cuda(self) -> bool:
        return self.device != "cpu"

    @cached_property
    def total_bytes(self) -> int:
        """Memory of the card; 0 on a CPU. Opens the device."""
        if not self.is_cuda:
            return 0
        import torch

        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def need_memory(self, size_bytes: float) -> None:
        """Raises LeftOut if the card is smaller."""
        if self.is_cuda and self.total_bytes < size_bytes:
            has, needs = self.total_bytes / 1e9, size_bytes / 1e9
            raise LeftOut(f"it needs a card with {needs:.0f} GB, this one has {has:.0f} GB")

    def in_folder(self, name: str) -> "Card":
        """The same card, with a new folder in this one."""
        folder = self.folder / name
        folder.mkdir(mode=0o700)
        return replace(self, folder=folder)


TestFunction = Callable[[Card], Checks]
"""Each test's file has one, by the name ``run``: the checks, one after the other as they are made."""


def part(name: str, checks: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """The checks of one part of a test. An error is a failed check of this part: the others run."""
    try:
        yield from checks()
    except LeftOut:
        raise
    except Exception as error:  # noqa: BLE001  # any error of a part is a failed check
        yield failure(f"{name}: ended", error)
