"""The losses of the algorithms, by the name in their row: ``losses/NAME.py`` has the function ``token_loss``.

So a loss is one file, and one row of ``ALGORITHMS``, which is data without torch.
"""

import importlib
from collections.abc import Callable
from functools import cache

from .loss import TokenLosses
from .loss_inputs import LossInputs

TokenLoss = Callable[[LossInputs], TokenLosses]
"""The loss of each token, before its weight, a KL and an entropy bonus: an algorithm's surrogate, or a user's."""


@cache
def token_loss_of(surrogate: str) -> TokenLoss:
    """The function of a row's ``surrogate``. Raises ModuleNotFoundError for a name without a file."""
    loss: TokenLoss = importlib.import_module(f".losses.{surrogate}", __package__).token_loss
    return loss
