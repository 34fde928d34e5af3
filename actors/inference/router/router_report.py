"""The waits and the statistics of the router, for people. Pure."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

from ....core.waits import Wait
from ...names import PolicyName
from .cut_links import CutLinks
from .instance_states import InstanceState
from .routed_policy import RoutedPolicy
from .router_config import RouterConfig
from .waiting_turns import RoutedInstance, RoutedTurn

Sessions = Mapping[int, Mapping[int, RoutedTurn]]
"""The turns of each rollout actor's session, by number."""
LoadsBefore = Callable[[PolicyName], Sequence[str]]
"""The instances whose loads those of a policy wait for (``load_order.py``)."""


def waits_of(
    policies: Mapping[PolicyName, RoutedPolicy],
    links: CutLinks,
    sessions: Sessions,
    config: RouterConfig,
    now: float,
    loads_before: LoadsBefore,
) -> list[Wait]:
    """Turns that wait, and instances that load or may be lost."""
    return [
        wait
        for name, policy in policies.items()
        for wait in (
            *_load_waits(name, policy, config, now, loads_before(name)),
            *_turn_waits(name, policy, links, sessions, config, now),
        )
    ]


def _load_waits(
    name: PolicyName, policy: RoutedPolicy, config: RouterConfig, now: float, before: Sequence[str]
) -> Iterator[Wait]:
    for instance in policy.instances.values():
        if instance.state is not InstanceState.LOADING:
            continue
        seconds = now - instance.loads_since_s
        limit = f"router.load_timeout_s={config.load_timeout_s:g} ends it"
        if instance.load_by_s is not None:
            text = f"{instance.name}, which loads version {policy.published} of {name}"
            yield Wait(text, seconds, limit, instance.name)
        elif before:
            text = f"{', '.join(before)} with weights that turns wait for, before {instance.name} loads those of {name}"
            yield Wait(text, seconds, limit, before[0])


def _turn_waits(
    name: PolicyName,
    policy: RoutedPolicy,
    links: CutLinks,
    sessions: Sessions,
    config: RouterConfig,
    now: float,
) -> Iterator[Wait]:
    turns = policy.waiting.count
    if policy.published is None:
        return
    if policy.no_instance_since_s is not None:
        if math.isinf(policy.no_instance_since_s):  # the run is about to end for that
            return
        states = [f"{instance.name} is {instance.state.value}" for instance in policy.instances.values()]
        text = f"an instance of {name} for {_turns(turns)}: {', '.join(states) or policy.last_loss}"
        yield Wait(text, now - policy.no_instance_since_s, _return_limit(config))
    elif turns and policy.serving:
        yield from _link_waits(name, policy, links, sessions, config, now)
        newer = turns - policy.waiting.for_version(policy.published)
        if newer:
            yield Wait(f"a newer version of {name} for {_turns(newer)}", 0.0, actor="trainer")
        if turns > newer:
            yield Wait(f"room at the instances of {name} for {_turns(turns - newer)}", 0.0, actor=name)


def _link_waits(
    name: PolicyName,
    policy: RoutedPolicy,
    links: CutLinks,
    sessions: Sessions,
    config: RouterConfig,
    now: float,
) -> Iterator[Wait]:
    """Turns of rollout actors that can reach no instance of the policy."""
    for session, since_s in {link.session: link.since_s for link in links}.items():
        count = sum(turn.policy == name for turn in sessions.get(session, {}).values())
        if count and links.all_closed(session, policy.instances.values()):
            cut = links.describe(session, policy.instances.values())
            yield Wait(
                f"an instance of {name} for {_turns(count)}: {cut}", now - since_s, _return_limit(config)
            )


def _return_limit(config: RouterConfig) -> str:
    return f"router.return_timeout_s={config.return_timeout_s:g} ends the run"


def _turns(number: int) -> str:
    return f"{number} turn{'' if number == 1 else 's'}"


def statistics_of(
    moves: int,
    queue_times_s: Iterable[float],
    instances: Iterable[RoutedInstance],
    policies: Mapping[PolicyName, RoutedPolicy],
) -> dict[str, float]:
    """See ``Router.statistics``."""
    statistics = {"moves": float(moves)}
    for instance in instances:
        for name, value in asdict(instance.load.totals).items():
            statistics[f"{name}.{instance.name}"] = value
    for policy, state in policies.items():
        for name, value in asdict(state.totals).items():
            statistics[f"policy_{name}.{policy}"] = value
    if times_s := sorted(queue_times_s):
        statistics["queue_p99_s"] = times_s[math.ceil(0.99 * len(times_s)) - 1]
    return statistics | {
        f"policy_waiting.{policy}": float(state.waiting.count) for policy, state in policies.items()
    }
