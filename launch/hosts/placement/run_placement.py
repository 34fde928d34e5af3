"""The placement of a run: its config, the hosts that it has, and the plan."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ....actors.errors import ConfigError
from ....actors.model_shape import ModelShape
from ....actors.names import PolicyName
from ...config.run_config import RunConfig
from ..cuda_build import driver_problem
from ..host_description import Gpu, HostDescription, describe_host, version_problems
from .actor_needs import needs_of
from .capacity import UNKNOWN_BYTES, is_usable, usable_bytes
from .gang_hosts import gang_problems
from .model_memory import known_shapes, unknown_shape
from .place import place
from .plan import DoesNotFit, Need, Plan
from .slot_states import states_note
from .state_memory import state_memory_problems, with_state_memory
from .training_bytes import Cards, shape_problems

_MACHINE: Final = re.compile(r"([1-9]\d*)x([1-9]\d*)x(\d+(?:\.\d+)?)GiB")
_MOST_CARDS: Final = 1 << 14
_CORES: Final = 256  # of a host that is made up; threads take turns if there are fewer


@dataclass(frozen=True, slots=True)
class RunPlacement:
    """``hosts``: those of the plan, the head first."""

    hosts: tuple[HostDescription, ...]
    plan: Plan

    def own_gpus(self) -> dict[str, tuple[str, ...]]:
        """The UUIDs of each actor's GPUs, for the actors whose processes see no others."""
        gpus = {host.name: host.gpus for host in self.hosts}
        return {
            actor: tuple(gpus[placed.node][number].uuid for number in placed.gpus)
            for actor, placed in self.plan.actors.items()
            if placed.gpus and not placed.sees_all
        }


def like_this_host(count: int) -> list[HostDescription]:
    """This host, and others that are made up: as large as this one."""
    host = describe_host()
    made_up = (
        replace(host, name=f"node-{n}", gpus=tuple(replace(gpu, uuid=f"{gpu.uuid}-{n}") for gpu in host.gpus))
        for n in range(1, count + 1)
    )
    return [host, *made_up]


def made_up_hosts(words: str) -> list[HostDescription]:
    """The hosts of ``2x8x80GiB``: hosts, cards of each, memory of each card. The sizes of the hosts' own memory are
    unknown, and not compared. Raises ConfigError."""
    match = _MACHINE.fullmatch(words)
    if match is None:
        raise ConfigError(
            f"--on {words}: HOSTSxCARDSxMEMORY is wanted, as 2x8x80GiB: 2 hosts with 8 cards of 80 GiB"
        )
    hosts, cards, size = int(match[1]), int(match[2]), int(float(match[3]) * 2**30)
    if size == 0 or hosts * cards > _MOST_CARDS:
        raise ConfigError(
            f"--on {words}: cards have memory, and {_MOST_CARDS} cards are the most that are planned"
        )
    pattern = describe_host()
    return [
        replace(
            pattern, name="head" if n == 0 else f"node-{n}", cores=_CORES, memory_bytes=UNKNOWN_BYTES, gpus_note="",
            shared_memory="/dev/shm", shared_memory_bytes=0, shared_memory_free_bytes=0, driver="",
            compiler_note="", cuda="",
            gpus=tuple(Gpu(f"GPU-{n}-{card}", card, f"{match[3]} GiB", size, size) for card in range(cards)),
        )
        for n in range(hosts)
    ]  # fmt: skip


def place_run(
    config: RunConfig, hosts: Sequence[HostDescription], *, all_models: bool = False
) -> RunPlacement:
    """Places all actors; the first host is the head. Raises DoesNotFit, also for hosts that don't fit each other.
    ``all_models``: see ``known_shapes``."""
    shapes = known_shapes(config, all_models=all_models)
    placement = place_shapes(config, hosts, shapes)
    unknown = [
        unknown_shape(config, name)
        for name, policy in config.policies.items()
        if name not in shapes and (model := policy.used_model) is not None
        if all_models or model.device != "cpu"
    ]
    notes = (*placement.plan.notes, *dict.fromkeys(unknown))
    return replace(placement, plan=replace(placement.plan, notes=notes))


def place_shapes(
    config: RunConfig, hosts: Sequence[HostDescription], shapes: Mapping[PolicyName, ModelShape]
) -> RunPlacement:
    """As ``place_run``, with the shapes of the models that are known."""
    if problems := [*_same_names(hosts), *version_problems(hosts)]:
        raise DoesNotFit(problems)
    if problems := list(shape_problems(config, shapes)):
        raise DoesNotFit(problems)
    cards = cards_of(hosts, share_gpus=config.hosts.share_gpus)
    needs = needs_of(config, shapes, cards)
    plan = place(needs, hosts, hosts[0].name, share_gpus=config.hosts.share_gpus)
    plan = replace(plan, notes=(*plan.notes, *_compiler_notes(hosts, needs)))
    if note := states_note(config, plan, hosts, shapes, cards):
        plan = replace(plan, notes=(*plan.notes, note))
    plan = with_state_memory(plan, config, shapes, cards)
    problems = [
        *driver_problems(hosts, plan),
        *gang_problems(config, hosts, plan),
        *state_memory_problems(plan, hosts),
    ]
    if problems:
        raise DoesNotFit(problems)
    return RunPlacement(tuple(hosts), plan)


def driver_problems(hosts: Sequence[HostDescription], plan: Plan) -> Iterator[str]:
    """A sentence for each host with actors on GPUs whose driver is too old for its PyTorch."""
    on_gpus = {placed.node for placed in plan.actors.values() if placed.gpus}
    for host in hosts:
        if host.name in on_gpus and (problem := driver_problem(host.cuda, host.driver)):
            yield f"PyTorch can't use the GPUs of {host.name}: {problem}"


def cards_of(hosts: Sequence[HostDescription], *, share_gpus: bool) -> Cards | None:
    """The GPUs that a run may use; None without any. The first host is the head."""
    gpus = [gpu for host in hosts for gpu in host.gpus if is_usable(gpu, share_gpus)]
    if not gpus:
        return None
    largest = max(gpus, key=usable_bytes)
    can_compile = not any(host.gpus and host.compiler_note for host in hosts)
    on_head = sum(is_usable(gpu, share_gpus) for gpu in hosts[0].gpus)
    return Cards(usable_bytes(largest), largest.total_bytes, len(gpus), can_compile, on_head)


def _compiler_notes(hosts: Sequence[HostDescription], needs: Sequence[Need]) -> Iterator[str]:
    if any(need.parts and need.purpose == "training" for need in needs):
        for host in hosts:
            if host.gpus and host.compiler_note:
                yield f"{host.name} compiles no layers, which takes more time and memory: {host.compiler_note}"


def _same_names(hosts: Sequence[HostDescription]) -> Iterator[str]:
    for name, count in Counter(host.name for host in hosts).items():
        if count > 1:
            yield f"{count} hosts have the name {name}: each needs one of its own"
