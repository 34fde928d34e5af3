"""The shares of the slots that policies have if all of them have work at once. Pure.

A gang has few samples for each rank: with as many ranks as samples the longest decides, and the other ranks wait for
it. So policies that compute at once on a few slots each use them better than a few policies on many.
"""

from collections.abc import Collection, Mapping

from ...names import PolicyName
from .gangs import Gang


def slot_shares(slots: int, gangs: Collection[Gang]) -> Mapping[PolicyName, int]:
    """The number of ``slots`` of each gang: at least ``Gang.fewest``, at most ``Gang.ranks``, in proportion to its
    load. Until each gang has computed, those with larger states have more. All of its ranks, as far as
    slots are without work, if the fewest of all leave nothing to divide: then they take turns."""
    if sum(gang.fewest for gang in gangs) >= slots:
        return {gang.policy: gang.ranks for gang in gangs}
    shares = {gang.policy: gang.fewest for gang in gangs}
    is_measured = all(gang.load for gang in gangs)
    loads = {gang.policy: gang.load if is_measured else float(gang.fewest) for gang in gangs}
    growing = {gang.policy: gang.ranks for gang in gangs if gang.fewest < gang.ranks}
    for _ in range(slots - sum(shares.values())):
        if not growing:
            break
        most = max(growing, key=lambda policy: loads[policy] / shares[policy])
        shares[most] += 1
        if shares[most] == growing[most]:
            del growing[most]
    return shares
