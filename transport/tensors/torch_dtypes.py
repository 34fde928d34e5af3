"""torch's dtypes by the names that travel (``handle.DTYPE_BYTES``), and the names by dtype."""

from typing import Final

import torch

from ..handle import DTYPE_BYTES

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in DTYPE_BYTES}
DTYPE_NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
