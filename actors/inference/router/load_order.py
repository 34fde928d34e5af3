"""The order in which policies load their new versions. Pure.

Loads of several policies share the network from the trainer's host, so that all would be late together. Weights that
turns wait for come first: in ``strict`` those of the agents that begin a trajectory, while the others' are not needed
for some turns yet.

    publish ──> begins at once      if turns wait for the policy, or no policy with such turns loads
           └──> waits ──> begins    when the first turn waits for it, or the last of those loads has ended
"""

from collections import Counter
from collections.abc import Callable

from ...names import PolicyName

Awaited = Callable[[PolicyName], bool]
"""True for a policy that turns wait for."""


class LoadOrder:
    """The loads under way. ``awaited``: as it is at each call."""

    def __init__(self, awaited: Awaited) -> None:
        self._awaited = awaited
        self._under_way = Counter[PolicyName]()

    def may_begin(self, policy: PolicyName) -> bool:
        """True if an instance is to load ``policy`` now."""
        return self._awaited(policy) or not any(map(self._awaited, +self._under_way))

    def begun(self, policy: PolicyName) -> None:
        """An instance loads ``policy``."""
        self._under_way[policy] += 1

    def ended(self, policy: PolicyName) -> None:
        """It has loaded it, or has failed to."""
        self._under_way[policy] -= 1
