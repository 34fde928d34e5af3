"""The tensors that a loss is made of: those of the algorithms, and those of users' own."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from .loss import by_token, sequence_sums


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The completion tokens of one forward: ``N`` tokens of ``R`` sequences, one sequence after the other, without
    padding. A sequence is one turn. All tensors are on the policy's device.

    ``logprobs`` ``[N]`` float32: of the tokens under the policy, with the gradient.
    ``old_logprobs`` ``[N]`` float32: under the old policy, which the setting ``old_policy`` chooses.
    ``behaviour_logprobs`` ``[N]`` float32: under the engine's policy, which generated them.
    ``advantages`` ``[N]`` float32: of each token; equal within a sequence unless a KL in the rewards or a critic makes
    them differ.
    ``lengths`` ``[R]`` int64, each at least 1: tokens of each sequence.
    ``group_sizes`` ``[R]`` int64: the number of rewards that the sequence's was compared with, its own included.
    ``rewards`` ``[R]`` float32: of each sequence.
    ``reference_logprobs`` ``[N]`` float32: under the reference policy; None without a KL in the loss or with a critic.
    ``entropies`` ``[N]`` float32: of the distributions, with the gradient; None without an ``entropy_coefficient``.
    ``columns`` ``[N]`` float32 each, by name: the setting ``loss_columns``.
    ``clip_low``, ``clip_high``, ``options``: the settings of these names.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    lengths: Tensor
    group_sizes: Tensor
    rewards: Tensor
    reference_logprobs: Tensor | None = None
    entropies: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    clip_low: float = 0.0
    clip_high: float = 0.0
    options: Mapping[str, float] = field(default_factory=dict)

    def sums(self, values: Tensor) -> Tensor:
        """The sums of ``values`` ``[N]`` over each sequence: ``[R]``."""
        return sequence_sums(values, self.lengths)

    def by_token(self, values: Tensor) -> Tensor:
        """``values`` ``[R]`` of the sequences, for each of their tokens: ``[N]``."""
        return by_token(values, self.lengths, len(self.logprobs))
