"""Random weights of a model, of which a process has one or two whole at a time.

The model's own code runs as it is, with all of its draws in their order: the values are those of ``seeded_model``.
Memory that it makes without contents, as the layers of torch do for their parameters, lies on the device ``meta``. An
operation on such a tensor is computed on a real one, which is made for the first and kept until others are changed.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from ....messages import ModelConfig
from ....pretrained import load_model, random_stream, without_parameters

Keep = Callable[[Tensor], Tensor]
"""Gives the rows to keep of a whole tensor, in memory of their own."""

_MOST_WHOLE: Final = 2
"""Tensors: a layer's weight and its bias."""
_OVERWRITING: Final = frozenset(
    {
        "normal_", "uniform_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_",
        "kaiming_normal_", "orthogonal_", "zero_", "fill_", "copy_",
    }
)  # fmt: skip
_OF_METADATA: Final = frozenset(
    {
        "shape", "dtype", "device", "is_meta", "layout", "ndim", "requires_grad", "grad", "grad_fn", "is_leaf", "size",
        "dim", "numel", "stride", "is_floating_point", "is_contiguous", "requires_grad_", "element_size",
    }
)  # fmt: skip


class DrawnAgain(Exception):
    """A model's code has changed a part of a weight long after it has set the weight: its rows alone are left."""


def drawn_model(
    config: ModelConfig, seed: int, dtype: torch.dtype, keep: Keep
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The model of ``seeded_model``, its parameters on ``meta`` and its buffers real; and the rows that ``keep`` has
    given for each parameter, by name. Raises DrawnAgain, and as ``load_model``."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(random_stream(seed))
        drawing = Drawing(keep)
        with drawing:
            model = load_model(config, dtype)
    drawing.keep_all()
    rows = {name: drawing.kept_of(parameter) for name, parameter in model.named_parameters()}
    return without_parameters(model), rows


class Drawing(TorchFunctionMode):
    """It holds for this thread only."""

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self._keep = keep
        self._whole: dict[int, Tensor] = {}
        """By the id of the tensor on ``meta``, the one that was used last at the end."""
        self._kept: dict[int, Tensor] = {}
        self._tensors: dict[int, Tensor] = {}  # an id may not be used again

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            return func(*args, **{**kwargs, "device": "meta"})
        outlines = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_meta]
        if not outlines or _name(func) in _OF_METADATA:
            return func(*args, **kwargs)
        whole = {id(outline): self._whole_of(outline, func) for outline in outlines}
        args, kwargs = tree_map_only(Tensor, lambda tensor: whole.get(id(tensor), tensor), (args, kwargs))
        result = func(*args, **kwargs)
        return next((outline for outline in outlines if whole[id(outline)] is result), result)

    def _whole_of(self, outline: Tensor, func: Callable[..., Any]) -> Tensor:
        key = id(outline)
        tensor = self._whole.pop(key, None)
        if tensor is None:
            if key in self._kept and _name(func) not in _OVERWRITING:
                raise DrawnAgain(_name(func))
            self._tensors[key] = outline
            while len(self._whole) >= _MOST_WHOLE:
                self._keep_oldest()
            tensor = torch.zeros(outline.shape, dtype=outline.dtype)
        self._whole[key] = tensor
        return tensor

    def _keep_oldest(self) -> None:
        key = next(iter(self._whole))
        self._kept[key] = self._keep(self._whole.pop(key))

    def keep_all(self) -> None:
        """Nothing is whole any more."""
        while self._whole:
            self._keep_oldest()

    def kept_of(self, parameter: Tensor) -> Tensor:
        """The rows that were kept of a parameter, which may be on ``meta`` or not."""
        if not parameter.is_meta:
            return self._keep(parameter.detach())
        rows = self._kept.get(id(parameter))
        return self._keep(torch.zeros(parameter.shape, dtype=parameter.dtype)) if rows is None else rows


def _name(func: Callable[..., Any]) -> str:
    """The name of a function, or of the property whose value it gives."""
    owner = getattr(func, "__self__", None)
    return str(getattr(owner if func.__name__ in ("__get__", "__set__") else func, "__name__", ""))
