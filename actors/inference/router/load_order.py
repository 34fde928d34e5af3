"""The order in which policies load their new versions. Pure.

Loads of several policies share the network from the trainer's host, so that all would be late together. Weights that
turns wait for come first: in ``strict`` those of the agents that begin a trajectory, while the others' are not needed
for some turns yet.

    publish ──> begins at once      if turns wait for the policy, or no policy with such turns loads
           └──> waits ──> begins    when the first turn waits for it, the last of those loads has ended or is given up
                                    as late, or it has waited as long as a load may take
"""

from collections.abc import Callable

from ...names import PolicyName

Awaited = Callable[[PolicyName], bool]
"""True for a policy that turns wait for."""


class LoadOrder:
    """The loads under way. ``awaited``: as it is at each call."""

    def __init__(self, awaited: Awaited) -> None:
        self._awaited = awaited
        self._under_way: dict[int, tuple[str, PolicyName]] = {}

    def before(self, policy: PolicyName) -> list[str]:
        """The instances whose loads an instance waits for before it loads ``policy``; empty if it may begin now."""
        if not self._under_way or self._awaited(policy):
            return []
        return [name for name, loaded in self._under_way.values() if self._awaited(loaded)]

    def begun(self, number: int, name: str, policy: PolicyName) -> None:
        """The instance with this number and name loads ``policy``."""
        self._under_way[number] = name, policy

    def ended(self, number: int) -> None:
        """It has loaded it, has failed to, or is given up: it may hang for long. May be called again."""
        self._under_way.pop(number, None)
