"""The weights that FSDP2 has gathered on a rank, counted whenever a module begins or ends its forward."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules import module as hooks


class GatheredWeights:
    """``most``: elements that were gathered at a time, those on their way included. Of a model whose layers are
    computed again in the backward, also in that."""

    def __init__(self, model: nn.Module) -> None:
        self.most = 0
        states: list[Any] = [
            module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)
        ]
        self._groups = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts within it."""
        with ExitStack() as stack:
            stack.callback(hooks.register_module_forward_pre_hook(self._count).remove)
            stack.callback(hooks.register_module_forward_hook(self._count).remove)
            yield

    def _count(self, *_: object) -> None:
        self.most = max(self.most, sum(map(_gathered_elements, self._groups)))


def _gathered_elements(group: Any) -> int:
    outputs: list[Tensor] = [
        output for parameter in group.fsdp_params for output in parameter.all_gather_outputs
    ]
    if group._all_gather_result is not None:
        outputs.append(group._all_gather_result.all_gather_output)
    return sum(output.untyped_storage().size() // output.element_size() for output in outputs)
