"""PyTorch's tensors in payloads, and their bytes in device memory."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..handle import DTYPE_BYTES, TensorSpec
from .tensor_kind import TensorKind

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in DTYPE_BYTES}
DTYPE_NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class TorchTensors(TensorKind[Tensor]):
    """See ``TensorKind``."""

    def dtype_name(self, tensor: Any) -> str | None:
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            return None
        return DTYPE_NAMES.get(tensor.dtype)

    def dtype(self, name: str) -> torch.dtype:
        return TORCH_DTYPES[name]

    def device(self, tensor: Tensor) -> str:
        return tensor.device.type

    def size_bytes(self, tensor: Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    def empty(self, spec: TensorSpec) -> Tensor:
        return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])

    def flat(self, memory: Any) -> Tensor:
        return torch.frombuffer(memory, dtype=torch.uint8)

    def view(self, part: Tensor, spec: TensorSpec) -> Tensor:
        return part.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)

    def adopt(self, tensor: Any) -> Tensor:
        return torch.as_tensor(tensor)

    def write(self, target: Tensor, source: Tensor) -> None:
        # Not no_grad: engines have weights that may only be written in inference mode; all others may be, too.
        with torch.inference_mode():
            target.copy_(source)

    def address(self, tensor: Tensor) -> int | None:
        # The bytes of a conjugate or negative view are those of its base.
        plain = tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        return tensor.data_ptr() if plain else None


KIND: Final[TensorKind[Tensor]] = TorchTensors()


def checksum(tensor: Tensor) -> int:
    """The sum of the 64-bit words of ``tensor`` (uint8, one dimension), modulo 2**64, computed by its device."""
    # Not xxh3, as in host memory: it runs on CPUs only, and the bytes would leave the device to be checked.
    whole = tensor.numel() // 8 * 8
    total = int(tensor[:whole].view(torch.int64).sum()) if whole else 0
    if whole < tensor.numel():
        total += int(
            pad(tensor[whole:].contiguous(), (0, 8 - tensor.numel() + whole)).view(torch.int64).sum()
        )
    return total % 2**64
