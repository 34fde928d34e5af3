"""The rule of UI-S1: so many departures are patched, and the next one ends the trajectory."""

from typing import Annotated, Literal

from ..config_base import Natural, Unit
from .patch_rule import Departure, PatchRule


class ThresholdRule(PatchRule):
    """Patches the first ``most`` departures of a trajectory (UI-S1, Lu et al., arXiv 2509.11543: the patch module with
    its threshold). With ``most: 0`` a trajectory ends at its first departure; the paper's other end is ``null``: all
    departures are patched."""

    patch: Literal["threshold"] = "threshold"
    """Rule of the patches: see [Demonstrations](environments.md#demonstrations)."""
    most: Annotated[Natural, Unit("turns")] | None = 1
    """Most patched turns of a trajectory. `null`: no limit."""

    def patches(self, departure: Departure) -> bool:
        return self.most is None or departure.patches < self.most
