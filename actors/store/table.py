"""One agent's table of samples: a row's life as a state machine. Pure: no clock, no I/O.

    READY --lease--> LEASED --commit--> consumed (the row is gone)

Rules:
- a sample id is accepted once: while its row is there it is known, and once rows of a version were consumed by
  its optimizer step, no row of that version or an earlier one is accepted any more;
- a lease hands out rows of exactly one policy version, oldest first, under a new fencing token;
- a commit names tokens of leases that are out; an unknown or used token is refused and changes nothing.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from ...core.errors import StoreError
from ..messages import MicroBatch, Sample, TableStatistics


class Table:
    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._known: set[str] = set()
        self._ready: dict[int, deque[Sample]] = {}
        self._leases: dict[int, tuple[Sample, ...]] = {}
        self._last_token = 0
        self._last_consumed_version = -1
        self._consumed = 0

    def check(self, samples: Iterable[Sample]) -> None:
        """Raises StoreError where ``put`` would be refused."""
        seen: set[str] = set()
        for sample in samples:
            if sample.sample_id in self._known or sample.sample_id in seen:
                raise StoreError(f"table {self._agent}: sample {sample.sample_id} was written before")
            if sample.policy_version <= self._last_consumed_version:
                raise StoreError(
                    f"table {self._agent}: sample {sample.sample_id} is of version {sample.policy_version}, whose step "
                    "was committed"
                )
            if len(sample.tokens) != len(sample.logprobs) or not sample.tokens:
                raise StoreError(
                    f"table {self._agent}: sample {sample.sample_id} has {len(sample.tokens)} tokens "
                    f"and {len(sample.logprobs)} log-probs"
                )
            seen.add(sample.sample_id)

    def put(self, samples: Sequence[Sample]) -> None:
        """Adds samples that ``check`` has passed."""
        for sample in samples:
            self._known.add(sample.sample_id)
            self._ready.setdefault(sample.policy_version, deque()).append(sample)

    def lease(self, policy_version: int, count: int) -> MicroBatch:
        ready = self._ready.get(policy_version, deque())
        if not 1 <= count <= len(ready):
            raise StoreError(
                f"table {self._agent}: {count} rows of version {policy_version} were asked for, "
                f"{len(ready)} are ready"
            )
        rows = tuple(ready.popleft() for _ in range(count))
        if not ready:
            del self._ready[policy_version]
        self._last_token += 1
        self._leases[self._last_token] = rows
        return MicroBatch(self._agent, self._last_token, rows)

    def commit(self, tokens: Sequence[int]) -> int:
        for token in tokens:
            if token not in self._leases:
                raise StoreError(f"table {self._agent}: no lease with token {token} is out")
        rows = [row for token in dict.fromkeys(tokens) for row in self._leases.pop(token)]
        self._known.difference_update(row.sample_id for row in rows)
        self._consumed += len(rows)
        for row in rows:
            self._last_consumed_version = max(self._last_consumed_version, row.policy_version)
        return len(rows)

    def statistics(self) -> TableStatistics:
        return TableStatistics(
            sum(map(len, self._ready.values())), sum(map(len, self._leases.values())), self._consumed
        )
