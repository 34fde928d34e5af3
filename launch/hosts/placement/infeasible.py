"""The reasons why needs don't fit hosts: the numbers that are needed and there, and the keys to change."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from ....actors.config_base import AUTO
from ..host_description import HostDescription
from .capacity import UNKNOWN_BYTES, is_part, is_usable, usable_bytes
from .plan import BESIDE, SHARE_GPUS, STATES, Need, Purpose

_LESS = "a smaller engine.kv_cache_bytes"
_LESS_TRAINING = (
    "more trainer.ranks, trainer.activation_checkpointing, fewer trainer.tokens_per_forward, or lora need "
    "less of it"
)
_WORDS: dict[Purpose, str] = {"training": "training", "generation": "the instances"}


def infeasible_reasons(
    needs: Sequence[Need], hosts: Sequence[HostDescription], head: str, *, share_gpus: bool
) -> Iterator[str]:
    """A sentence for each reason for which no plan can exist; without one there may be a plan."""
    head_host = next(host for host in hosts if host.name == head)
    usable = {host.name: sum(is_usable(gpu, share_gpus) for gpu in host.gpus) for host in hosts}
    problems = [problem for need in needs for problem in _unusable_gpus(need, head_host, share_gpus)]
    for purpose in _WORDS:
        gpu_needs = [need for need in needs if need.gpus and need.purpose == purpose]
        if sum(need.gpus for need in gpu_needs) > sum(usable.values()):
            problems.append(_too_few(gpu_needs, purpose, hosts, usable))
        else:
            problems += _too_wide(gpu_needs, hosts, share_gpus)
            problems += _too_few_on_head([need for need in gpu_needs if need.on_head], head_host, usable)
    problems += _gpu_memory(needs, hosts, share_gpus)
    problems += _memory_of_named(needs, head_host)
    problems += _host_memory(needs, hosts)
    yield from dict.fromkeys(problems)


def no_way_found(needs: Sequence[Need], hosts: Sequence[HostDescription], *, share_gpus: bool) -> str:
    """The refusal for needs that fit by their sums and one by one, but for which the search found no places."""
    rooms = "; ".join(_free(host, share_gpus) for host in _sort_by_name(hosts))
    total = sum(need.gpus for need in needs)
    usable = sum(is_usable(gpu, share_gpus) for host in hosts for gpu in host.gpus)
    alone = f": each on GPUs of its own takes {total}, and there are {usable}" if total > usable else ""
    has_states = any(name == BESIDE for need in needs for name, _ in need.parts)
    one_state = f"{STATES}=1 (auto takes it if two have no room), " if has_states else ""
    return (
        f"no way was found to place {_sizes(needs)} on the hosts, which have {rooms}{alone}; take more GPUs, fewer "
        f"instances or slots, {one_state}or {_LESS}"
    )


def _unusable_gpus(need: Need, head: HostDescription, share_gpus: bool) -> Iterator[str]:
    for number in need.named:
        if number >= len(head.gpus):
            yield (
                f"{need.key}: GPU {number} is needed, counted from 0, and {_count(len(head.gpus))} shown on "
                f"{head.name}{_note(head)}"
            )
        elif not is_usable(head.gpus[number], share_gpus):
            yield f"{need.key}: {_describe_use(head, number)}"


def _too_few(
    needs: Sequence[Need], purpose: Purpose, hosts: Sequence[HostDescription], usable: dict[str, int]
) -> str:
    by_key: dict[str, list[Need]] = {}
    for need in needs:
        by_key.setdefault(need.key, []).append(need)
    parts = [_part(key, some) for key, some in by_key.items()]
    gpus_by_host = ", ".join(
        f"{usable[host.name]} on {host.name}{_note(host)}" for host in _sort_by_name(hosts)
    )
    remedy = "take fewer trainer.ranks and pool.slots" if purpose == "training" else "take fewer instances"
    if not any(host.gpus for host in hosts):
        remedy = "write model.device=cpu, or plan hosts with GPUs by `flexmarl train RECIPE --on 1x8x80GiB`"
    elif any(need.purpose == "generation" and need.gpus == 1 for need in needs):
        remedy += ", or model.device=cuda:0, on which all instances of a policy compute together"
    return (
        f"{_WORDS[purpose]} needs {sum(need.gpus for need in needs)} GPUs ({', '.join(parts)}), and there are "
        f"{sum(usable.values())}: {gpus_by_host}; {remedy}{_in_use(hosts, usable)}"
    ).replace("the instances needs", "the instances need")


def _too_few_on_head(needs: Sequence[Need], head: HostDescription, usable: dict[str, int]) -> Iterator[str]:
    """Actors of one purpose, which don't share a GPU."""
    needed = sum(need.gpus for need in needs)
    if needed > usable[head.name]:
        keys = ", ".join(dict.fromkeys(need.key for need in needs))
        reason, remedy = "the trainer is there", ""
        if any(need.actor.startswith("slot-") for need in needs):
            reason, remedy = "slots are there without hosts.spread", "write hosts.spread=true, or "
        yield (
            f"{keys}: {needed} GPUs are needed on the head ({reason}), and {head.name} has {usable[head.name]}"
            f"{_note(head)}; {remedy}start the run on a host with {needed}{_in_use([head], usable)}"
        )


def _part(key: str, needs: Sequence[Need]) -> str:
    most = max(need.gpus for need in needs)
    return key if most == 1 else f"{key} with {most} for each"


def _too_wide(needs: Sequence[Need], hosts: Sequence[HostDescription], share_gpus: bool) -> Iterator[str]:
    """Instances with several GPUs: too many for one host, or more instances than the hosts have room for. A process
    sees one part of a GPU (MIG) at most."""
    usable = {
        host.name: sum(is_usable(gpu, share_gpus) and not is_part(gpu) for gpu in host.gpus) for host in hosts
    }
    has_parts = any(is_part(gpu) for host in hosts for gpu in host.gpus)
    parts = "; parts of GPUs (MIG) do not count: write engine.tensor_parallel=1" if has_parts else ""
    largest = max(_sort_by_name(hosts), key=lambda host: usable[host.name])
    most = usable[largest.name]
    for size in sorted({need.gpus for need in needs if need.gpus > 1}, reverse=True):
        wide = [need for need in needs if need.gpus >= size]
        keys = ", ".join(dict.fromkeys(need.key for need in wide))
        room = sum(count // size for count in usable.values())
        if size > most:
            yield (
                f"{keys}: an instance needs {size} GPUs of one host (engine.tensor_parallel), and the most are {most}, "
                f"on {largest.name}{parts}{_in_use([largest], usable)}"
            )
        elif len(wide) > room:
            yield (
                f"{keys}: {len(wide)} instances need {size} GPUs of one host each (engine.tensor_parallel), and the "
                f"hosts have room for {room}; take fewer instances{parts}{_in_use(hosts, usable)}"
            )


def _gpu_memory(needs: Sequence[Need], hosts: Sequence[HostDescription], share_gpus: bool) -> Iterator[str]:
    gpus = [
        (usable_bytes(gpu), host.name) for host in hosts for gpu in host.gpus if is_usable(gpu, share_gpus)
    ]
    most, name = max(gpus, default=(0, ""))
    for need in needs:
        if need.gpus and gpus and need.gpu_bytes > most:
            yield (
                f"{need.key}: {_gib(need.gpu_bytes)} are needed on each GPU{_parts(need)}, and the most are "
                f"{_gib(most)}, on {name}; {_remedy(need)}"
            )


def _parts(need: Need) -> str:
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in need.parts)
    return f" ({listed})" if listed else ""


def _remedy(need: Need) -> str:
    if need.purpose == "generation":
        return f"{_LESS}, or more GPUs by engine.tensor_parallel"
    has_states = any(name == BESIDE for name, _ in need.parts)
    one_state = f"{STATES}={AUTO}, " if has_states else ""
    return f"{one_state}{_LESS_TRAINING}"


def _memory_of_named(needs: Sequence[Need], head: HostDescription) -> Iterator[str]:
    for number, gpu in enumerate(head.gpus):
        on_it = [need for need in needs if number in need.named]
        if (needed := sum(need.gpu_bytes for need in on_it)) > usable_bytes(gpu):
            keys = ", ".join(dict.fromkeys(need.key for need in on_it))
            yield (
                f"{keys}: {_gib(needed)} are needed on GPU {number} of {head.name}, which has "
                f"{_gib(usable_bytes(gpu))}; take fewer instances, or {_LESS}"
            )


def _host_memory(needs: Sequence[Need], hosts: Sequence[HostDescription]) -> Iterator[str]:
    some = [need for need in needs if need.memory_bytes]
    total, capacity_bytes = sum(need.memory_bytes for need in some), sum(host.memory_bytes for host in hosts)
    largest = max(host.memory_bytes for host in hosts)
    if total > capacity_bytes:
        keys = ", ".join(dict.fromkeys(need.key for need in some))
        slots = ", or fewer slots" if any(need.purpose == "training" for need in some) else ""
        yield (
            f"{_gib(total)} of memory are needed ({keys}), and the hosts have {_gib(capacity_bytes)}; take fewer "
            f"instances, or {_LESS}{slots}"
        )
    for need in some:
        if need.memory_bytes > largest:
            yield (
                f"{need.key}: {_gib(need.memory_bytes)} of memory are needed on one host, and the most are "
                f"{_gib(largest)}; {_LESS}"
            )


def _in_use(hosts: Sequence[HostDescription], usable: dict[str, int]) -> str:
    """The GPUs that are left out because others use them."""
    used = [
        _describe_use(host, number)
        for host in _sort_by_name(hosts)
        if usable[host.name] < len(host.gpus)
        for number, gpu in enumerate(host.gpus)
        if gpu.users
    ]
    return "; " + "; ".join(used) if used else ""


def _describe_use(host: HostDescription, number: int) -> str:
    gpu = host.gpus[number]
    return (
        f"GPU {gpu.index} ({gpu.uuid}) of {host.name} is used by {', '.join(map(str, gpu.users))}, and "
        f"{_gib(gpu.free_bytes)} of it are free: {SHARE_GPUS} takes it all the same"
    )


def _note(host: HostDescription) -> str:
    return f" ({host.gpus_note})" if host.gpus_note else ""


def _count(gpus: int) -> str:
    return "none is" if not gpus else f"{gpus} {'is' if gpus == 1 else 'are'}"


def _free(host: HostDescription, share_gpus: bool) -> str:
    gpus = Counter(_gib(usable_bytes(gpu)) for gpu in host.gpus if is_usable(gpu, share_gpus))
    listed = " and ".join(f"{count} GPUs of {size}" for size, count in gpus.items()) or "no GPUs"
    memory = "" if host.memory_bytes == UNKNOWN_BYTES else f"{_gib(host.memory_bytes)} of memory, "
    return f"{host.name}: {memory}{listed}"


def _sizes(needs: Sequence[Need]) -> str:
    """The actors that take GPUs or memory, equal ones that follow each other once."""
    large = [need for need in needs if need.gpus or need.named or need.memory_bytes]
    parts = []
    for size, group in groupby(large, key=_size):
        first, *more = [need.actor for need in group]
        parts.append(f"{first} to {more[-1]} ({size} each)" if more else f"{first} ({size})")
    return ", ".join(parts)


def _size(need: Need) -> str:
    count = max(need.gpus, len(need.named))
    gpus = f"{count} GPU{'s' if count > 1 else ''} with {_gib(need.gpu_bytes)}" if count else ""
    memory = f"{_gib(need.memory_bytes)} of memory" if need.memory_bytes else ""
    return ", ".join(filter(None, (gpus, memory)))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _sort_by_name(hosts: Sequence[HostDescription]) -> list[HostDescription]:
    return sorted(hosts, key=lambda host: host.name)
