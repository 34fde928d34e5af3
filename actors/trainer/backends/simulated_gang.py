"""The ranks of a simulated policy in a process group of their own: they compute nothing, and meet at every computation.

Imports PyTorch, which a simulated trainer otherwise does not have.
"""

import torch

from ...errors import ProtocolViolation
from ...messages import GangPlace
from ...names import PolicyName
from .torch_policy.gang_meeting import Meeting, Membership
from .torch_policy.gang_rank import GangRank

_MODULUS = 2**32


def open_meeting(host: str) -> Meeting:
    """See ``BackendFactory.open_meeting``."""
    return Meeting(host)


def membership_of(place: GangPlace) -> Membership:
    """See ``BackendFactory.membership``."""
    device = torch.device("cpu")
    return Membership(place.rank, place.size, place.meeting, device, replicas=place.replicas)


def meet(gang: GangRank, policy: PolicyName, digest: int) -> None:
    """Returns when all ranks have called this. Raises ProtocolViolation if one has another ``digest`` of what it has
    trained, and as a collective call of a gang that has lost a rank."""
    part = digest % _MODULUS
    if gang.sum(torch.tensor([part])).item() != gang.size * part:
        raise ProtocolViolation(f"policy {policy}: the ranks have trained other samples")
