"""The ranks of one policy: processes that compute it together, each with a part of every tensor.

They join a process group for as long as the policy is bound to their slots. All of them make the same calls of the
policy's backend in the same order; each call that computes is a collective one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ...shards import Shard, shard_of, whole
from .layers import layers_of


class GangRank:
    """This process in a gang: ``rank``, from 0, of ``size``. One rank alone has no process group."""

    def __init__(self, rank: int = 0, size: int = 1, mesh: DeviceMesh | None = None) -> None:
        self.rank, self.size = rank, size
        self._mesh = mesh

    @property
    def group(self) -> distributed.ProcessGroup | None:
        """The process group; None for one rank alone."""
        return None if self._mesh is None else self._mesh.get_group()

    def sum(self, values: Tensor) -> Tensor:
        """``values`` (on the gang's device) summed over the ranks, in place."""
        if self._mesh is not None:
            distributed.all_reduce(values, group=self._mesh.get_group())
        return values

    def shard(self, model: nn.Module, *, keep_root: bool, bfloat16: bool) -> None:
        """Divides the parameters of ``model`` over the ranks: each layer of its own is gathered for its forward alone.

        Gradients are summed over the ranks. Calls must go through the forward of ``model`` itself. ``keep_root``: the
        parameters outside the layers stay gathered from a forward to its backward. ``bfloat16``: the layers
        compute in it.
        """
        if self._mesh is None:
            return
        precision = MixedPrecisionPolicy()
        if bfloat16:
            # Layers are gathered as they compute, in half of the bytes. Parameters outside of them are gathered in
            # float32: the gradients of an embedding's rows, and of the output layer's chunks, are summed in it.
            precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        for layer in layers_of(model):
            fully_shard(layer, mesh=self._mesh, mp_policy=precision)
        fully_shard(model, mesh=self._mesh, reshard_after_forward=not keep_root)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Without the first, a factor is multiplied before the sum, which gloo can't.
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)

    def release(self, model: nn.Module) -> None:
        """Frees the parameters that a forward of ``model`` has gathered and no backward will. Otherwise its next
        forward would compute with them, also behind an optimizer step."""
        if isinstance(model, FSDPModule):
            model.reshard()

    def rows(self, shape: Sequence[int]) -> Shard:
        """This rank's part of a tensor with ``shape`` that is divided."""
        return shard_of(shape, self.rank, self.size)

    def part(self, tensor: Tensor) -> Shard:
        """This rank's part of a model's tensor."""
        if isinstance(tensor, DTensor):
            return self.rows(tensor.shape)
        return whole(tensor.shape)


ALONE = GangRank()
"""One rank."""


def gather(tensor: Tensor) -> Tensor:
    """The whole of ``tensor`` on every rank; all of them call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def divided_like(tensor: Tensor, rows: Tensor) -> Tensor:
    """``rows`` as this rank's part of a tensor that is divided as ``tensor`` is."""
    if not isinstance(tensor, DTensor):
        return rows
    return DTensor.from_local(
        rows, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
    )


def local(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that is on this rank: the live memory, without gradient."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
