"""The state of one step: how far its groups are, and each policy's samples. Pure."""

from dataclasses import dataclass, field
from typing import Final

from ..names import PolicyName, Version

_UNKNOWN: Final = Version(-1)


@dataclass(slots=True)
class PolicyStep:
    """One policy's samples of one step, those of all its agents, and how far they have come.

    ``version``: trains the step; known once the step is ``current``, that is, when the policy has finished the step
    before. ``carried``: rows that earlier steps left to this one; ``sent`` and ``trained`` of them are included if the
    policy's optimizer has not stepped since. ``closed``: rows of this step's closed groups. ``under_way``: computations
    that were sent and have not ended.
    """

    version: Version = _UNKNOWN
    current: bool = False
    carried: int = 0
    closed: int = 0
    sent: int = 0
    trained: int = 0
    under_way: int = 0
    optimizing: bool = False
    stepped: bool = False
    done: bool = False

    @property
    def rows(self) -> int:
        """Rows that the policy may train in the step: those that earlier steps left, and those of closed groups."""
        return self.carried + self.closed

    @property
    def next_version(self) -> Version:
        """The version after the step. Known once the policy is done with the step, and, if its batch is always all of
        the step's samples, as soon as the step is rolled out."""
        steps = self.optimizing if self.done else self.closed > 0
        return Version(self.version + steps)

    @property
    def left_over(self) -> int:
        """Rows that the step leaves to the next, once the policy is done with it."""
        return self.rows - (self.sent if self.optimizing else 0)

    def limit(self, batch: int | None) -> int:
        """Number of the present rows that belong to the step's global batch.

        ``batch``: its size, or None for all rows. Rows that the optimizer step before passed over are never passed
        over again: a batch is larger than its size if it takes that.
        """
        return self.rows if batch is None else min(self.rows, max(batch, self.carried))

    def begin(self, version: Version) -> None:
        """Makes the step the policy's current one: it trains it with ``version``."""
        self.version, self.current = version, True

    def follow(self, before: "PolicyStep") -> None:
        """Takes over what the policy's step before has left."""
        self.begin(Version(before.version + before.optimizing))
        if before.optimizing:
            self.carried = before.left_over
        else:  # rows that were sent are in the accumulated gradient: the optimizer has not stepped since
            self.carried, self.sent, self.trained = before.left_over, before.sent, before.trained


@dataclass(slots=True)
class StepState:
    """``groups``: those of the step, closed ones included. ``held``: open ones that the step must wait for, which come
    from outside or from the step before. ``lets_go``: it waits no longer for some groups, whose rewards are missing."""

    policies: dict[PolicyName, PolicyStep]
    groups: int
    groups_closed: int = 0
    held: int = 0
    lets_go: bool = False
    replacements: int = 0
    rolled_out: bool = False
    awaits_evaluation: bool = False
    save_asked: set[PolicyName] = field(default_factory=set)
    saved: set[PolicyName] = field(default_factory=set)
    committing: bool = False
    committed: bool = False

    def take(self, samples: dict[PolicyName, int] | None) -> None:
        """Adds a group that was there before the step began. ``samples``: None if it is open."""
        self.groups += 1
        if samples is None:
            self.held += 1
        else:
            self.close(samples)

    def close(self, samples: dict[PolicyName, int]) -> None:
        """A group of the step has closed with ``samples``."""
        self.groups_closed += 1
        for policy, count in samples.items():
            self.policies[policy].closed += count

    @property
    def next_versions(self) -> dict[PolicyName, Version]:
        """The versions after the step; known once it is rolled out, since then it is known which policies step."""
        return {policy: state.next_version for policy, state in self.policies.items()}

    @property
    def left_over(self) -> dict[PolicyName, int]:
        """By policy: ``PolicyStep.left_over``."""
        return {policy: state.left_over for policy, state in self.policies.items()}

    @property
    def has_samples(self) -> bool:
        """True once a group of the step has left a sample."""
        return any(state.closed for state in self.policies.values())

    @property
    def complete(self) -> bool:
        """True once every policy is done: it has applied its next version, or keeps the one it has."""
        return all(state.done for state in self.policies.values())

    @property
    def unsaved(self) -> bool:
        """True from the first Save of a policy until the checkpoint is committed."""
        return bool(self.save_asked) and not self.committed

    @property
    def may_be_committed(self) -> bool:
        """True if all policies are saved, no evaluation is missing, and CommitCheckpoint has not been decided yet."""
        all_saved = len(self.saved) == len(self.policies)
        return all_saved and self.complete and not self.awaits_evaluation and not self.committing
