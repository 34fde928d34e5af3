"""A rule without a memory: each departure is patched with the same chance."""

from typing import Literal

from ..config_base import Share
from .patch_rule import Departure, PatchRule


class ChanceRule(PatchRule):
    """Patches each departure with the probability ``chance``: the mixture of expert and policy of DAgger (Ross et al.,
    arXiv 1011.0686, section 3), where a departure that is not patched ends the trajectory. Early and late turns are
    patched alike, unlike with a threshold, which is spent on the first ones."""

    patch: Literal["chance"] = "chance"
    """Rule of the patches."""
    chance: Share = 0.5
    """Probability that a departure is patched."""

    def patches(self, departure: Departure) -> bool:
        return departure.draw < self.chance
