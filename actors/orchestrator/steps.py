"""The books of one step: how far its groups are, and each agent's samples. Pure."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class AgentStep:
    """One agent's samples of one step, and how far they have come.

    ``version``: trains the step; known once the step is ``current``, that is, when the agent's step before is behind
    it. ``carried``: rows that earlier steps left to this one, ``sent`` and ``trained`` of them included where the
    agent's optimizer did not step since.
    """

    version: int = -1
    current: bool = False
    carried: int = 0
    closed: int = 0
    sent: int = 0
    trained: int = 0
    optimizing: bool = False
    stepped: bool = False
    done: bool = False

    @property
    def rows(self) -> int:
        return self.carried + self.closed

    @property
    def next_version(self) -> int:
        """What follows the step: known once the agent is done with it, and, where its batch is always all of the
        step's samples, as soon as the step is rolled out."""
        steps = self.optimizing if self.done else self.closed > 0
        return self.version + steps

    @property
    def left_over(self) -> int:
        """Rows that the step leaves to the next, once the agent is through with it."""
        return self.rows - (self.sent if self.optimizing else 0)

    def limit(self, batch: int | None) -> int:
        """How many of the rows there are belong to the step's global batch.

        ``batch``: its size, or None for all rows. What the optimizer step before passed over is never passed over
        again: a batch is larger than its size where it takes that.
        """
        return self.rows if batch is None else min(self.rows, max(batch, self.carried))

    def begin(self, version: int) -> None:
        self.version, self.current = version, True

    def follow(self, before: "AgentStep") -> None:
        """Takes over what the agent's step before has left."""
        self.begin(before.version + before.optimizing)
        if before.optimizing:
            self.carried = before.left_over
        else:  # what was sent is in the accumulated gradient: the optimizer has not stepped since
            self.carried, self.sent, self.trained = before.left_over, before.sent, before.trained


@dataclass(slots=True)
class Step:
    agents: dict[str, AgentStep]
    groups_closed: int = 0
    replacements: int = 0
    rolled_out: bool = False
    awaits_evaluation: bool = False
    save_asked: set[str] = field(default_factory=set)
    saved: set[str] = field(default_factory=set)
    committing: bool = False
    committed: bool = False

    @property
    def next_versions(self) -> dict[str, int]:
        """What follows the step; known once it is rolled out, since then it is known who steps."""
        return {agent: state.next_version for agent, state in self.agents.items()}

    @property
    def left_over(self) -> dict[str, int]:
        return {agent: state.left_over for agent, state in self.agents.items()}

    @property
    def complete(self) -> bool:
        return all(state.done for state in self.agents.values())

    @property
    def unsaved(self) -> bool:
        return bool(self.save_asked) and not self.committed

    @property
    def may_be_committed(self) -> bool:
        all_saved = len(self.saved) == len(self.agents)
        return all_saved and self.complete and not self.awaits_evaluation and not self.committing
