"""torch's tensors as values in messages. Importing this module makes ``torch.Tensor`` an annotation for endpoints.

    from flexmarl.transport.message_tensors import MessageTensor

    @endpoint
    async def score(self, tokens: torch.Tensor, mask: MessageTensor | None = None) -> torch.Tensor: ...

``MessageTensor`` is for fields of dataclasses and models. What ``arrays`` says of copies, of who owns the memory and
of the wire holds here too. Sent are dense tensors of the CPU that need no gradient: a message carries values, and a
graph or a device that was lost on the way should not go unnoticed. Weights and training states belong into
``StateTransport``.

Apart from ``arrays`` because importing torch takes seconds and 200 MB.
"""

from typing import TYPE_CHECKING, Any, Final

import torch

from ..core.signature import register_type, wire_type
from .handle import DTYPE_BYTES
from .message_arrays import MAX_DIMENSIONS, own_bytes, read_fields, to_fields

_DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in DTYPE_BYTES}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


def _to_plain(tensor: torch.Tensor) -> dict[str, Any]:
    """Raises TypeError where more than its numbers would be lost."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):  # a DTensor, say, has only its own shard
        raise TypeError(f"a {type(tensor).__name__} can't be sent, only a plain tensor")
    if tensor.requires_grad:
        raise TypeError(
            "a tensor that requires grad can't be sent, its graph stays here: send tensor.detach()"
        )
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise TypeError(
            f"a tensor on {tensor.device}, {tensor.layout}, can't be sent, only a dense one on the CPU"
        )
    if tensor.dtype not in _NAMES:
        raise TypeError(f"a tensor of {tensor.dtype} can't be sent (known: {', '.join(_NAMES.values())})")
    if tensor.ndim > MAX_DIMENSIONS:
        raise TypeError(f"a tensor of {tensor.ndim} dimensions can't be sent, the limit is {MAX_DIMENSIONS}")
    # A conjugate or negative view is stored as it was before: resolving it copies.
    stored = tensor.resolve_conj().resolve_neg().contiguous()
    # Not reshape(-1): one element, or none, counts as contiguous with any stride, and keeps it.
    flat = stored.as_strided((stored.numel(),), (1,)).view(torch.uint8).numpy()
    return to_fields(_NAMES[tensor.dtype], tensor.shape, flat)


def _from_plain(value: Any) -> torch.Tensor:
    name, shape, data = read_fields(value, DTYPE_BYTES)
    if 0 in shape:  # torch.frombuffer takes no empty buffer
        return torch.empty(shape, dtype=_DTYPES[name])
    return torch.frombuffer(own_bytes(data), dtype=_DTYPES[name]).reshape(shape)


register_type(torch.Tensor, _to_plain, _from_plain)

if TYPE_CHECKING:
    MessageTensor = torch.Tensor
else:
    MessageTensor = wire_type(torch.Tensor)
