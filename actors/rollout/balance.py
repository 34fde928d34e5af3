"""The choice of the instance that generates the next turn. Pure."""

from collections.abc import Sequence


def least_outstanding(outstanding: Sequence[int]) -> int:
    """The index of the instance with the fewest turns under way; the first of several.

    FlexMARL (arXiv 2602.09578), intra-agent load balancing.
    """
    return min(range(len(outstanding)), key=outstanding.__getitem__)
