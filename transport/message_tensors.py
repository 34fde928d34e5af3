"""Torch tensors as values in messages. Importing this module makes ``torch.Tensor`` an annotation for endpoints.

    from flexmarl.transport.message_tensors import MessageTensor

    @endpoint
    async def score(self, tokens: torch.Tensor, mask: MessageTensor | None = None) -> torch.Tensor: ...

``MessageTensor`` is for fields of dataclasses and models. The rules of ``message_arrays`` about copies, ownership of
memory and the wire hold here too. Only dense CPU tensors that need no gradient can be sent: a message carries values,
and a graph or a device must not get lost silently. Weights and training states belong into ``StateTransport``.

A module of its own, because importing torch takes seconds and 200 MB.
"""

from typing import TYPE_CHECKING, Any

import torch

from ..core.wire_types import register_type, wire_type
from .handle import DTYPE_BYTES
from .message_arrays import MAX_DIMENSIONS, own_bytes, read_fields, to_fields
from .paths.torch_dtypes import DTYPE_NAMES, TORCH_DTYPES


def _to_plain(tensor: torch.Tensor) -> dict[str, Any]:
    """Raises TypeError if anything but the numbers would get lost."""
    # A DTensor, for example, has only its own shard.
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(f"a {type(tensor).__name__} can't be sent, only a plain tensor")
    if tensor.requires_grad:
        raise TypeError(
            "a tensor that requires grad can't be sent, its graph stays here: send tensor.detach()"
        )
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise TypeError(
            f"a tensor on {tensor.device}, {tensor.layout}, can't be sent, only a dense one on the CPU"
        )
    if tensor.dtype not in DTYPE_NAMES:
        raise TypeError(
            f"a tensor of {tensor.dtype} can't be sent (known: {', '.join(DTYPE_NAMES.values())})"
        )
    if tensor.ndim > MAX_DIMENSIONS:
        raise TypeError(f"a tensor of {tensor.ndim} dimensions can't be sent, the limit is {MAX_DIMENSIONS}")
    # A conjugate or negative view has the bytes of its base: resolving copies it.
    stored = tensor.resolve_conj().resolve_neg().contiguous()
    # Not reshape(-1): a tensor of at most one element is contiguous with any stride, and keeps that stride.
    flat = stored.as_strided((stored.numel(),), (1,)).view(torch.uint8).numpy()
    return to_fields(DTYPE_NAMES[tensor.dtype], tensor.shape, flat)


def _from_plain(value: Any) -> torch.Tensor:
    name, shape, data = read_fields(value, DTYPE_BYTES)
    if 0 in shape:  # torch.frombuffer takes no empty buffer
        return torch.empty(shape, dtype=TORCH_DTYPES[name])
    return torch.frombuffer(own_bytes(data), dtype=TORCH_DTYPES[name]).reshape(shape)


register_type(torch.Tensor, _to_plain, _from_plain)

if TYPE_CHECKING:
    MessageTensor = torch.Tensor
else:
    MessageTensor = wire_type(torch.Tensor)
