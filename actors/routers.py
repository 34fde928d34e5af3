"""The routers of a mixture of experts: their choices are recorded in an engine, and replayed in a trainer.

Routers of all architectures in transformers score the experts of a layer, take the best by ``torch.topk`` and weigh
them by these scores, each in a way of its own. So one place serves all of them: within a router's forward the result of
``topk`` over the experts is noted, or replaced by other experts with their scores. Weights and gradients are then the
router's, of the experts that were chosen elsewhere (Ma et al., arXiv 2510.11370, section 3).
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .errors import UnsupportedModel
from .expert_routes import dtype_of

_ROUTER: Final = re.compile(r".*Top[kK]Router")
_LAYER: Final = re.compile(r"(.*\blayers\.(\d+))\..+")


@dataclass(slots=True)
class ReplayedRoutes:
    """The argument ``expert_routes`` of a model whose routers ``replay_routes`` has changed.

    ``experts``: ``[tokens, layers, experts of a token]`` int16, -1 where the router chooses; the tokens are those of
    the forward, row by row, padding included. ``was_read``: a router has taken its choice from here.
    """

    experts: Tensor
    was_read: bool = False

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> "ReplayedRoutes":
        """The same, not read yet, with the tensor changed."""
        return ReplayedRoutes(change(self.experts))

    def count(self, positions: Tensor) -> Tensor:
        """The number of the tokens at ``positions`` that are replayed, as a scalar; a token counts by the share of its
        experts that are."""
        return (self.experts.index_select(0, positions) >= 0).float().mean((1, 2)).sum()


class _Choice(TorchFunctionMode):
    """Notes the choice of one router in ``experts``, int64 ``[tokens, top_k]``. With ``replayed`` the router gets that
    one in its place, but for its entries below 0."""

    def __init__(self, router: Any, replayed: Tensor | None = None) -> None:
        super().__init__()
        self._shape = router.num_experts, router.top_k
        self._replayed = replayed
        self._masked: Tensor | None = None
        self.experts: Tensor | None = None

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is Tensor.masked_fill and self._replayed is not None:
            return self._unmask(args[0], result)
        if function not in (torch.topk, Tensor.topk):
            return result
        scores, (values, experts) = args[0], result
        # Some routers choose groups of experts before, by another topk.
        if scores.dim() != 2 or (scores.shape[-1], experts.shape[-1]) != self._shape:
            return result
        masked = self._masked
        self.experts = experts if masked is None else masked.topk(experts.shape[-1]).indices
        if self._replayed is not None:
            experts = torch.where(self._replayed >= 0, self._replayed.long(), experts)
            values = scores.gather(-1, experts)
        return torch.return_types.topk((values, experts))

    def _unmask(self, scores: Tensor, masked: Tensor) -> Tensor:
        """``masked`` without the mask of tokens that are replayed. A router that has chosen groups before masks the
        scores of the others, and some weigh by these: an expert of a group that rounding left out would weigh 0."""
        assert self._replayed is not None, "only a replay changes scores"
        if scores.dim() != 2 or scores.shape[-1] != self._shape[0]:
            return masked
        self._masked = masked
        return torch.where((self._replayed >= 0).all(-1, keepdim=True), scores, masked)


class _Router:
    """A router in ``model``, the layer that it is in and this layer's number. Until ``remove`` it takes ``replayed`` in
    the place of its choice, if it is not None. While it ``records`` it notes its choice in ``experts``."""

    def __init__(self, model: nn.Module, place: re.Match[str], module: Any, *, records: bool) -> None:
        """``place``: of its name, with that of the layer and its number."""
        self.layer_module, self.layer = model.get_submodule(place[1]), int(place[2])
        self.count, self.top_k = int(module.num_experts), int(module.top_k)
        self.replayed: Tensor | None = None
        self.experts: Tensor | None = None
        self.records = records
        self.module, self._forward, self._former = module, module.forward, vars(module).get("forward")
        self._model, self._name = type(model).__name__, place[0]
        module.forward = self._choose

    def _choose(self, *args: Any, **settings: Any) -> Any:
        if self.replayed is None and not self.records:
            return self._forward(*args, **settings)
        with _Choice(self.module, self.replayed) as choice:
            output = self._forward(*args, **settings)
        if choice.experts is None and self.replayed is not None:
            self.refuse()
        self.experts = choice.experts if self.records else None
        return output

    def refuse(self) -> NoReturn:
        """Raises UnsupportedModel for a router whose choice is not seen."""
        raise UnsupportedModel(
            self._model, f"router_replay can't follow the choice of its router {self._name}"
        )

    def remove(self) -> None:
        """Gives the router its former forward back."""
        if self._former is None:
            del self.module.forward
        else:
            self.module.forward = self._former


def _routers(model: nn.Module, *, records: bool) -> list[_Router]:
    """Raises UnsupportedModel for a model without routers, and leaves it as it was."""
    modules = [item for item in model.named_modules() if _ROUTER.fullmatch(type(item[1]).__name__)]
    if not modules:
        problem = "router_replay is for mixtures of experts whose layers have a TopKRouter"
        raise UnsupportedModel(type(model).__name__, problem)
    places = [_LAYER.fullmatch(name) for name, _ in modules]
    if None in places:
        name = modules[places.index(None)][0]
        raise UnsupportedModel(type(model).__name__, f"router_replay finds no layer of its router {name}")
    return [
        _Router(model, place, module, records=records)
        for place, (_, module) in zip(filter(None, places), modules, strict=True)
    ]


class RouteRecorder:
    """Records the choices of all routers of ``model``, forward by forward; if not ``always``, those of forwards within
    ``replaying``. Raises UnsupportedModel for a model whose routers it does not know; for a router that chooses in
    another way than by ``topk`` its first ``take`` does."""

    def __init__(self, model: Any, *, always: bool = True) -> None:
        self._routers = _routers(model, records=always)
        self._always = always
        self._layers: int = model.config.get_text_config(decoder=True).num_hidden_layers
        self.dtype: torch.dtype = getattr(torch, dtype_of(max(router.count for router in self._routers)).name)
        """The type of the routes."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the routes of a token: layers, and experts of a token."""
        return self._layers, max(router.top_k for router in self._routers)

    @contextmanager
    def replaying(self, experts: Tensor) -> Iterator[None]:
        """Within it the routers get ``experts``, as in ``ReplayedRoutes``. The choices that are recorded are those that
        they would have made."""
        for router in self._routers:
            router.replayed, router.records = experts[:, router.layer, : router.top_k], True
        try:
            yield
        finally:
            for router in self._routers:
                router.replayed, router.records = None, self._always

    def take(self) -> Tensor:
        """The routes of the latest forward, ``[tokens, layers, experts of a token]``, row by row."""
        routes: Tensor | None = None
        for router in self._routers:
            if router.experts is None:
                router.refuse()
            if routes is None:
                shape = len(router.experts), *self.shape
                routes = torch.zeros(shape, dtype=self.dtype, device=router.experts.device)
            routes[:, router.layer, : router.top_k] = router.experts
            router.experts = None
        assert routes is not None, "a recorder has routers"
        return routes

    def remove(self) -> None:
        """Leaves the model as it was."""
        for router in self._routers:
            router.remove()


def recorder_of(model: Any, *, always: bool = True) -> RouteRecorder | None:
    """A recorder; None for a model whose routers it does not know."""
    try:
        return RouteRecorder(model, always=always)
    except UnsupportedModel:
        return None


def replay_routes(model: nn.Module) -> None:
    """From now on ``model`` takes the argument ``expert_routes``, ``ReplayedRoutes``. To be called before the layers
    are recomputed: the second forward of a layer takes the routes of the first. Raises UnsupportedModel as
    ``RouteRecorder``."""
    _replay(_routers(model, records=False))


def _replay(routers: Sequence[_Router]) -> None:
    # An argument that goes down to the layers, and no attribute for the time of a forward: a layer that is recomputed
    # in the backward would find the routes of another forward there.
    layers: dict[int, list[_Router]] = {}
    for router in routers:
        layers.setdefault(id(router.layer_module), []).append(router)
    for of_layer in layers.values():
        layer: Any = of_layer[0].layer_module
        layer.forward = partial(_replaying_forward, of_layer, layer.forward)


def _replaying_forward(
    routers: Sequence[_Router],
    forward: Callable[..., Any],
    *args: Any,
    expert_routes: ReplayedRoutes | None = None,
    **settings: Any,
) -> Any:
    if expert_routes is None:
        return forward(*args, **settings)
    for router in routers:
        router.replayed = expert_routes.experts[:, router.layer, : router.top_k]
    try:
        output = forward(*args, **settings)
    finally:
        for router in routers:
            router.replayed = None
    expert_routes.was_read = True
    return output


def refuse_unread(model: nn.Module) -> NoReturn:
    """Raises UnsupportedModel for a model whose routers have not got the ``expert_routes`` of a forward."""
    problem = "router_replay: its layers do not get the arguments of the model: set it to false"
    raise UnsupportedModel(type(model).__name__, problem)


class _Reached(Exception):
    """A router of a trial has chosen."""


def try_routers(model: Any) -> None:
    """Raises UnsupportedModel for a model on the device ``meta`` whose routers can't be recorded or replayed: all that
    a first forward of an engine and of a trainer would raise. The model is of no use any more."""
    routers = _routers(model, records=True)
    _replay(routers)
    layers, experts = 1 + max(router.layer for router in routers), max(router.top_k for router in routers)

    def end(router: _Router, *_: object) -> None:
        if router.replayed is None:
            refuse_unread(model)
        raise _Reached

    for router in routers:
        router.module.register_forward_hook(partial(end, router))
    with torch.device("meta"):
        tokens = torch.zeros(1, 2, dtype=torch.int64)
        routes = ReplayedRoutes(torch.zeros(2, layers, experts, dtype=torch.int16))
        mask = torch.zeros(1, 1, 2, 2)  # made of the tokens it would read their values
    try:
        model(input_ids=tokens, attention_mask=mask, use_cache=False, expert_routes=routes)
    except UnsupportedModel:
        raise
    except Exception:  # noqa: BLE001  # the first router has chosen, or its model does not run without memory
        pass
