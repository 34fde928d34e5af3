"""Hosts and needs that are made up."""

from collections.abc import Sequence

from flexmarl.actors.model_shape import ModelShape
from flexmarl.launch.hosts.host_description import Gpu, GpuUser, HostDescription
from flexmarl.launch.hosts.placement.capacity import usable_bytes
from flexmarl.launch.hosts.placement.plan import Need, Plan

GIB = 1 << 30


def host(
    name: str,
    gpus: int = 0,
    *,
    cores: int = 16,
    memory: int = 128 * GIB,
    gpu_bytes: int = 80 * GIB,
    used: Sequence[int] = (),
    note: str = "",
    shared_memory: int = GIB,
    python: str = "3.11.7",
) -> HostDescription:
    """``used``: the numbers of the GPUs that ada computes on, with 30 GiB."""
    user = GpuUser(4711, "ada", "python", 30 * GIB)
    found = tuple(
        Gpu(
            f"GPU-{name}-{n}", n, "H100", gpu_bytes, gpu_bytes - 30 * GIB * (n in used),
            (user,) if n in used else (),
        )
        for n in range(gpus)
    )  # fmt: skip
    return HostDescription(
        name, cores, memory, found, note, "/dev/shm", shared_memory, shared_memory, python, {}
    )


def shape(parameters: int) -> ModelShape:
    """A model of ten equal layers."""
    return ModelShape(
        parameters, layers=10, layer_parameters=parameters // 10, outside_parameters=0,
        largest_tensor=parameters // 50, linear_parameters=parameters, hidden=1024, intermediate=4096, heads=16,
        key_heads=4, head_dim=64, vocabulary=1000, context=512, experts=1, is_gated=True, norms_heads=False,
        adapted=(("q_proj", 20480),),
    )  # fmt: skip


def instances(count: int, gpus: int = 1, policy: str = "a", gpu_bytes: int = 0) -> list[Need]:
    key = f"policies.{policy}.instances={count}"
    return [Need(f"{policy}-{n}", key, gpus=gpus, gpu_bytes=gpu_bytes) for n in range(count)]


def slots(count: int, ranks: int = 1) -> list[Need]:
    return [
        Need(
            f"slot-{n}", f"pool.slots={count}", purpose="training", gpus=1,
            gang=n // ranks if ranks > 1 and n < count // ranks * ranks else None,
        )
        for n in range(count)
    ]  # fmt: skip


def trainer(gpus: int = 0) -> Need:
    return Need("trainer", "policies.a.model.device=cuda", on_head=True, purpose="training", gpus=gpus)


def check_plan(plan: Plan, needs: Sequence[Need], hosts: Sequence[HostDescription], head: str) -> bool:
    """Asserts that a plan keeps the rules; true if a GPU has two actors."""
    assert list(plan.actors) == [need.actor for need in needs]
    by_name = {host.name: host for host in hosts}
    memory = {host.name: host.memory_bytes for host in hosts}
    left = {(host.name, n): usable_bytes(gpu) for host in hosts for n, gpu in enumerate(host.gpus)}
    own: dict[tuple[str, int], list[str]] = {}
    for need in needs:
        placed = plan.actors[need.actor]
        assert placed.node == head or not need.on_head
        assert len(set(placed.gpus)) == len(placed.gpus) == (need.gpus or len(need.named))
        assert set(placed.gpus) <= set(range(len(by_name[placed.node].gpus)))
        memory[placed.node] -= need.memory_bytes
        for number in placed.gpus:
            left[placed.node, number] -= need.gpu_bytes
            if not need.named:
                own.setdefault((placed.node, number), []).append(need.purpose)
    assert min(memory.values()) >= 0 and min(left.values(), default=0) >= 0
    assert all(len(set(purposes)) == len(purposes) for purposes in own.values())
    return any(len(purposes) > 1 for purposes in own.values())
