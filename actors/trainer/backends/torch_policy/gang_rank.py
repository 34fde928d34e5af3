"""The ranks of one policy: processes that compute it together, each with samples of its own and a part of every tensor.

They join a process group for as long as the policy is bound to their slots. All of them make the same calls of the
policy's backend in the same order; each call that computes is a collective one.

The tensors are divided over all ranks, or over those of a replica: then each replica has all of them, and gradients are
summed within the replicas first, and then over them (hybrid sharding: Zhao et al., "PyTorch FSDP", arXiv 2304.11277,
section 3.2.2). Numbers that all replicas have, such as the whole weights, are read from the first.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ...shards import Shard, shard_of, whole
from .layers import layers_of

_SHARD: Final = "shard"
"""The name of the dimension of a mesh over which tensors are divided."""


class GangRank:
    """This process in a gang: ``rank``, from 0, of ``size``. One rank alone has no process group.

    Samples are divided over all ranks, tensors over those of a replica: ``rank_in_replica``, from 0, of
    ``replica_size``. The first ranks are those of the first replica, and so on.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, mesh: DeviceMesh | None = None, *, replicas: int = 1
    ) -> None:
        """``mesh``: see ``mesh_of``."""
        self.rank, self.size, self.replicas = rank, size, replicas
        self.replica_size = size // replicas
        self.rank_in_replica = rank % self.replica_size
        self._mesh = mesh

    @property
    def is_in_first_replica(self) -> bool:
        """True on the ranks that speak for all: the others have the same parts."""
        return self.rank < self.replica_size

    @property
    def replica_group(self) -> distributed.ProcessGroup | None:
        """The process group of the replica; None for one rank alone."""
        return None if self._mesh is None else self._mesh.get_group(self._mesh.ndim - 1)

    def sum(self, values: Tensor) -> Tensor:
        """``values`` (on the gang's device), each of a rank's samples, summed over all ranks, in place."""
        if self._mesh is not None:
            distributed.all_reduce(values)
        return values

    def begin_replica_sum(self, values: Tensor) -> Any:
        """Begins to sum ``values`` (on the gang's device), the same part of each replica, over the replicas, in place.
        ``wait()`` of the result ends it; on a GPU it is for the present stream alone."""
        assert self._mesh is not None and self.replicas > 1
        return distributed.all_reduce(values, group=self._mesh.get_group(0), async_op=True)

    def sum_of_parts(self, values: Tensor) -> Tensor:
        """``values`` (on the gang's device), each of a rank's parts of tensors, summed over its replica, in place."""
        if self._mesh is not None:
            distributed.all_reduce(values, group=self.replica_group)
        return values

    def shard(self, model: nn.Module, *, keep_root: bool, bfloat16: bool) -> None:
        """Divides the parameters of ``model`` over the replica. A layer is gathered for its forward alone.

        Gradients are summed over the replica, and by ``replica_sums.py`` over the others. Calls must go through the
        forward of ``model`` itself. ``keep_root``: the parameters outside the layers stay gathered from a forward to
        its backward. ``bfloat16``: the layers compute in it.
        """
        if self._mesh is None:
            return
        mesh = self._mesh if self.replicas == 1 else self._mesh[_SHARD]
        precision = MixedPrecisionPolicy()
        if bfloat16:
            # Layers are gathered as they compute, in half of the bytes. Parameters outside of them are gathered in
            # float32: the gradients of an embedding's rows, and of the output layer's chunks, are summed in it.
            precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(model, mesh=mesh, reshard_after_forward=not keep_root)
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
        return shard_of(shape, self.rank_in_replica, self.replica_size)

    def part(self, tensor: Tensor) -> Shard:
        """This rank's part of a model's tensor."""
        if isinstance(tensor, DTensor):
            return self.rows(tensor.shape)
        return whole(tensor.shape)


ALONE = GangRank()
"""One rank."""


def mesh_of(device: str, size: int, replicas: int, options: Any = None) -> DeviceMesh:
    """The mesh of a gang, by its process group: ``[size]``, or ``[replicas, size / replicas]``, whose groups are made
    now. ``options``: of those."""
    if replicas == 1:
        return init_device_mesh(device, (size,))
    dimensions = ("replicate", _SHARD)
    overrides = None if options is None else dict.fromkeys(dimensions, options)
    shape = (replicas, size // replicas)
    return init_device_mesh(device, shape, mesh_dim_names=dimensions, backend_override=overrides)


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
