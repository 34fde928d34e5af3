"""A router whose instances serve, and the turns that tests ask it for."""

from typing import Any

from flexmarl.actors.inference.router.router import Router
from flexmarl.actors.inference.router.router_config import RouterConfig
from flexmarl.actors.inference.router.router_decisions import Route
from flexmarl.actors.messages import RouteRequest
from flexmarl.actors.names import PolicyName, Version

A, B = PolicyName("a"), PolicyName("b")
CONFIG = RouterConfig(load_timeout_s=50.0, return_timeout_s=80.0)


def asked(
    turn: int, policy: PolicyName = A, oldest: int = 0, newest: int | None = 0, **more: Any
) -> RouteRequest:
    values: dict[str, Any] = {"prompt_tokens": 10, "downstream_tokens": 0.0, "prefix": f"own {turn}"} | more
    return RouteRequest(turn, policy, Version(oldest), None if newest is None else Version(newest), **values)


def serving(capacities: dict[str, int], policy: PolicyName = A) -> Router:
    """Instances by name that all serve version 0."""
    router = Router([A, B], CONFIG)
    numbers = [router.joined(name, (policy,), capacity, 0.0)[0] for name, capacity in capacities.items()]
    router.published(policy, Version(0), 0.0)
    for number in numbers:
        router.loaded(number, Version(0), 0.0)
    router.decisions(0.0)
    return router


def routes(router: Router, now: float = 0.0) -> dict[int, str]:
    """The instances that turns are routed to now."""
    decided = router.decisions(now)
    return {d.routed.turn: router.name_of(d.routed.instance) for d in decided if isinstance(d, Route)}
