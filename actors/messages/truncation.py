"""The truncation of a distribution over tokens, as a turn asks for it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Truncation:
    """Tokens of low probability that are never drawn; the others share their probability in proportion.

    In this order, after the temperature, as in vLLM: ``min_p`` leaves tokens of at least that share of the greatest
    probability (Nguyen et al., arXiv 2407.01082), ``top_k`` the so many most probable, ``top_p`` the fewest most
    probable ones that together have that probability (Holtzman et al., arXiv 1904.09751). Tokens as probable as the
    last one that is left are left too. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 leave all.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def leaves_all(self) -> bool:
        """True if no token is cut off."""
        return self.top_k == 0 and self.top_p == 1 and self.min_p == 0

    def problem(self) -> str | None:
        """The first value that is invalid, with its key; None if all are valid."""
        if self.top_k < 0:
            return f"top_k is {self.top_k}, needs at least 0 (0 is off)"
        if not 0 < self.top_p <= 1:
            return f"top_p is {self.top_p}, needs more than 0 and at most 1 (1 is off)"
        if not 0 <= self.min_p < 1:
            return f"min_p is {self.min_p}, needs at least 0 and less than 1 (0 is off)"
        return None
