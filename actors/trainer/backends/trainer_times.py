"""Times of a policy's computations on its ranks: of micro-batches and the optimizer step. Pure.

The samples of a micro-batch are divided over the ranks, as ``shards.py`` does it, and the rank with the most to compute
decides. It takes its tokens in forwards of a limited size. Meanwhile the ranks gather the weights of each layer twice,
and reduce its gradients once:

    forward and backward   the longer of computing the tokens and exchanging the weights; in the last of a micro-batch
                           the gradient is summed over the replicas too

A forward of few tokens achieves less of the peak than one of many: as if it had ``spare_tokens`` more.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from ...config_base import Config, Count, NonNegative, Positive, Unit
from ..shards import divide


class TrainerTimes(Config):
    """Coefficients of a policy on its ranks, in seconds. Moves of its state take the time of the cluster's links."""

    token_s: Annotated[Positive, Unit("s")]
    """Forward and backward of a token on one rank, without attention."""
    element_token_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Element-wise operations of a token on one rank, beside its products."""
    pair_s: Annotated[NonNegative, Unit("s")]
    """Attention of a token to one before it, forward and backward, on one rank."""
    spare_tokens: Annotated[NonNegative, Unit("tokens")]
    """Tokens that a forward could have computed in the time in which the device is not filled."""
    forward_s: Annotated[NonNegative, Unit("s")] = 0.0
    """A forward and backward beside its products."""
    exchange_s: Annotated[NonNegative, Unit("s")]
    """Gathering the weights and reducing the gradients in a forward and backward, with several ranks."""
    replica_sum_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Summing the gradient of a micro-batch over the replicas."""
    tokens_per_forward: Annotated[Count, Unit("tokens")]
    """Most tokens of a rank's forward."""
    optimizer_s: Annotated[NonNegative, Unit("s")]
    """The optimizer step."""
    save_s: Annotated[NonNegative, Unit("s")]
    """Writing a checkpoint."""

    def micro_batch_s(self, lengths: Sequence[int], ranks: int) -> float:
        """Forward and backward of samples of these lengths, prompts included. Grows with each of them."""
        sizes = np.array(lengths, np.int64)
        shares = [sizes[rows] for rows in divide(sizes, ranks)]
        # As in a gang: a rank with fewer forwards takes part in those of the others with nothing to compute.
        forwards = max(1, *(-(-int(share.sum()) // self.tokens_per_forward) for share in shares))
        compute_s = max(
            (self.token_s + self.element_token_s) * float(share.sum())
            + self.pair_s * float(share @ share) / 2
            for share in shares
        )
        compute_s += forwards * (self.forward_s + self.spare_tokens * self.token_s)
        if ranks == 1:
            return compute_s
        longest_s = max(compute_s, forwards * self.exchange_s)
        spare_s = longest_s / forwards - self.exchange_s  # of the last one, beside its own exchange
        return longest_s + max(0.0, self.replica_sum_s - spare_s)
