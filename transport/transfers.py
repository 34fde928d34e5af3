"""The transfers of one process: each has a deadline; they are counted, and a change of their path is logged."""

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from ..core.telemetry import get_logger
from .errors import TransferTimeout
from .handle import PathName
from .memory import Progress, ReadRequest
from .select import Choice
from .statistics import Chosen, PathStatistics

R = TypeVar("R")
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Transfer:
    """``size_bytes``: of the part of the state that moves. ``progress``: see ``TransferTimeout``."""

    operation: Literal["set", "get", "exchange"]
    key: str
    version: int
    path: PathName
    size_bytes: int
    timeout_s: float
    progress: Progress = field(default_factory=Progress)

    @classmethod
    def of(cls, request: ReadRequest[Any], timeout_s: float) -> "Transfer":
        """A Get."""
        handle, path = request.handle, request.source.path
        return cls("get", handle.key, handle.version, path, request.size_bytes, timeout_s, request.progress)

    async def timed(self, moving: Awaitable[R]) -> tuple[R, float]:
        """Its result, and the seconds that it took. Raises TransferTimeout after the deadline, when the transfer has
        been cancelled and has ended."""
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout_s):
                result = await moving
        except TimeoutError as expired:
            raise TransferTimeout(
                self.operation, self.key, self.version, self.path, self.size_bytes, self.timeout_s,
                self.progress.words,
            ) from expired  # fmt: skip
        return result, time.perf_counter() - started


class Transfers:
    """``chosen``: the path that the last Get of each key took."""

    def __init__(self) -> None:
        self.chosen: dict[str, Chosen] = {}
        self._totals: dict[PathName, PathStatistics] = {}
        self._logged: dict[str, str] = {}

    async def set(self, transfer: Transfer, moving: Awaitable[R]) -> R:
        """Raises TransferTimeout, and the errors of ``moving``."""
        if self._is_new(f"set {transfer.key} {transfer.path}", "offered"):
            log.debug("state offered", key=transfer.key, path=transfer.path, size_bytes=transfer.size_bytes)
        result, seconds = await transfer.timed(moving)
        totals = self._of(transfer.path)
        totals.sets += 1
        totals.set_bytes += transfer.size_bytes
        totals.set_s += seconds
        return result

    async def get(self, transfer: Transfer, choice: Choice, moving: Awaitable[R]) -> R:
        """Raises TransferTimeout, and the errors of ``moving``."""
        self.chosen[transfer.key] = Chosen(choice.path, choice.reason, choice.refused)
        if self._is_new(f"get {transfer.key}", f"{choice.path}: {choice.reason}"):
            report = log.warning if choice.is_downgrade else log.info
            report(
                "transfer path chosen",
                key=transfer.key,
                path=choice.path,
                reason=choice.reason,
                refused=choice.refused,
                size_bytes=transfer.size_bytes,
            )
        result, seconds = await transfer.timed(moving)
        totals = self._of(transfer.path)
        totals.gets += 1
        totals.get_bytes += transfer.size_bytes
        totals.get_s += seconds
        return result

    def totals(self) -> dict[PathName, PathStatistics]:
        """A copy, of the paths that were used."""
        return {path: replace(totals) for path, totals in self._totals.items()}

    def _of(self, path: PathName) -> PathStatistics:
        return self._totals.setdefault(path, PathStatistics())

    def _is_new(self, transfer: str, how: str) -> bool:
        """False if it went as the last time, as at almost every optimizer step."""
        is_new = self._logged.get(transfer) != how
        self._logged[transfer] = how
        return is_new
