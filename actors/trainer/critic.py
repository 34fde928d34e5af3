"""What PPO needs of a critic's values: the advantage estimator and the value loss. No critic is trained here yet."""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def generalized_advantages(
    rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., arXiv 1506.02438, eq. 16), sequence by sequence.

    ``A_t = delta_t + gamma lam A_{t+1}`` with ``delta_t = r_t + gamma V_{t+1} - V_t``; after a sequence's last token
    both ``V`` and ``A`` are 0. ``rewards`` (token-wise, a trajectory's reward on its last token) and ``values`` are
    ``[N]``, ``lengths`` ``[R]``. Returns ``(advantages, returns)``, both ``[N]``; the returns ``A_t + V_t`` are what
    the critic learns. ``gamma`` 1 and ``lam`` 0.95 are InstructGPT's (Ouyang et al., arXiv 2203.02155, appendix C.4).
    """
    value, reward = padded(values, lengths), padded(rewards, lengths)
    after = torch.nn.functional.pad(value, (0, 1))[:, 1:]
    delta = reward + gamma * after - value
    carried = torch.zeros_like(delta[:, 0])
    advantages = torch.empty_like(delta)
    # Right padding has a delta of 0 and comes first from the end: it carries nothing in.
    for t in range(delta.shape[1] - 1, -1, -1):
        carried = delta[:, t] + gamma * lam * carried
        advantages[:, t] = carried
    packed = advantages[_inside(lengths)]
    return packed, packed + values


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float = 0.2) -> Tensor:
    """The critic's loss per token, ``[N]``, to be summed and divided by the step's tokens.

    ``max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2``: PPO's squared error (arXiv 1707.06347, eq. 9)
    with the clip of its published code (Engstrom et al., arXiv 2005.12729, section 3). Gradients flow through
    ``values`` only.
    """
    bounded = torch.clamp(values, old_values - clip, old_values + clip)
    return torch.maximum((values - returns).square(), (bounded - returns).square()) / 2


def padded(values: Tensor, lengths: Tensor) -> Tensor:
    """``[N]`` to ``[R, longest]``, zeros on the right."""
    return pad_sequence(list(torch.split(values, lengths.tolist())), batch_first=True)


def _inside(lengths: Tensor) -> Tensor:
    """``[R, longest]`` bool: where `padded` has values."""
    return torch.arange(int(lengths.max()), device=lengths.device) < lengths.unsqueeze(1)
