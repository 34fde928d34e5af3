"""One run of the workflow on one query: what names it, how its time is counted, which turns it took."""

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ...core.errors import RecipeError
from ..messages import Generation, Query, Sample
from ..workflow import Rewards


class Trajectory:
    """``scope`` (the step, or ``eval``) makes names unique over the run, also where a query comes again.

    ``group`` is ``{scope}:{query}``, a turn's sample id ``{group}_{turn}_{trajectory}``.
    """

    def __init__(
        self, query: Query, scope: str, number: int, versions: Mapping[str, int], *, greedy: bool
    ) -> None:
        self.query = query
        self.group = f"{scope}:{query.id}"
        self.number = number
        self.versions = versions
        self.greedy = greedy
        self.rewards = Rewards()
        self.first_turn_at = math.inf
        self.deadline: asyncio.Timeout | None = None
        self._turns: list[tuple[str, str, Generation]] = []
        self._asked = 0
        self._waiting = 0
        self._closed = False

    @property
    def name(self) -> str:
        return f"{self.group}_{self.number}"

    def next_sample_id(self) -> str:
        """Of a turn that is being asked for. Raises RecipeError once the workflow has returned."""
        if self._closed:
            raise RecipeError(f"trajectory {self.name}: the workflow asked for a turn after it had returned")
        self._asked += 1
        return f"{self.group}_{self._asked - 1}_{self.number}"

    def took(self, agent: str, sample_id: str, generation: Generation) -> None:
        """A turn has ended. One that ends after its workflow returned is no part of the trajectory."""
        if not self._closed:
            self._turns.append((agent, sample_id, generation))

    def close(self) -> None:
        """The workflow has returned: the trajectory's turns are those that have ended."""
        self._closed = True

    def agents_used(self) -> set[str]:
        return {agent for agent, _, _ in self._turns}

    @contextmanager
    def waiting_for_a_version(self) -> Iterator[None]:
        """The time inside does not count against the deadline: it is the trainer's, not the trajectory's."""
        deadline = self.deadline
        if deadline is None or deadline.expired():
            yield
            return
        self._waiting += 1
        if self._waiting == 1:
            due = deadline.when()
            assert due is not None
            self._left_s = due - asyncio.get_running_loop().time()
            deadline.reschedule(None)
        try:
            yield
        finally:
            self._waiting -= 1
            if self._waiting == 0 and not self._closed:
                deadline.reschedule(asyncio.get_running_loop().time() + self._left_s)

    def turn_begins(self) -> None:
        self.first_turn_at = min(self.first_turn_at, time.monotonic())

    def samples(self, step: int, group_rewards: Mapping[str, tuple[float, ...]]) -> list[Sample]:
        """Its turns as rows; ``group_rewards`` are those of all surviving trajectories, by agent."""
        return [
            Sample(
                sample_id=sample_id,
                agent=agent,
                step=step,
                policy_version=generation.policy_version,
                group=self.group,
                reward=self.rewards.by_agent[agent],
                group_rewards=group_rewards[agent],
                prompt_tokens=generation.prompt_tokens,
                tokens=generation.tokens,
                logprobs=generation.logprobs,
            )
            for agent, sample_id, generation in self._turns
        ]
