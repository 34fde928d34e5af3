"""A policy divided by FSDP2 over NCCL is suspended and resumed without a loss of memory.

A gang of one rank: its process group, its sharding and its moves are those of any size, but no bytes travel. Criteria:
building and resuming need the state and one whole model; the forward gathers two layers and the parameters outside of
them; publishing needs a range of rows; five times suspended and resumed the policy holds as much memory as before, and
the same state; a process group takes less than ten seconds.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from flexmarl.actors.names import PolicyName
from flexmarl.actors.trainer.backends.policy_backend import TrainingStep
from flexmarl.actors.trainer.backends.torch_policy.gang_meeting import LOOPBACK, Meeting, Membership
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import ALONE, GangRank
from flexmarl.actors.trainer.backends.torch_policy.torch_factory import TorchFactory
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.rank_bytes import RANGE_BYTES
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from flexmarl.transport.handle import TensorSpec

from .checks import Card, Check, at_most, holds, part
from .filled_policies import fill
from .models import HALF_BILLION, TINY, Shape, make_samples, setup_of
from .timing import free_memory, live_bytes, peak_bytes, synchronize

_NAME = PolicyName("battery")
_ROUNDS = 5
_MEETING_S = 120.0
_MOST_GROWTH = 1 << 20
_MOST_GROUP_S = 10.0


def run(card: Card) -> Iterator[Check]:
    shape = HALF_BILLION if card.is_cuda else TINY
    yield from part("process group", lambda: measure_groups(card))
    yield from part("building", lambda: measure_build(card, shape))
    free_memory(card.device)
    yield from part("suspending", lambda: suspend_and_resume(card, shape))
    free_memory(card.device)
    yield from part("one rank without a group", lambda: measure_alone(card, shape))


@contextmanager
def gang_of_one(card: Card) -> Iterator[GangRank]:
    """This process in a gang with a process group."""
    meeting = Meeting(LOOPBACK)
    membership = Membership(0, 1, meeting.address, torch.device(card.device), _MEETING_S)
    try:
        yield membership.join_group()
    finally:
        membership.leave()
        meeting.close()


def measure_groups(card: Card) -> Iterator[Check]:
    """Seconds of process groups, one after the other."""
    starts, ends = [], []
    for _ in range(_ROUNDS):
        began = perf_counter()
        with gang_of_one(card) as gang:
            gang.sum(torch.ones(1, device=card.device))
            synchronize(card.device)
            starts.append(perf_counter() - began)
            began = perf_counter()
        ends.append(perf_counter() - began)
    yield Check("process group: first one, until a sum", starts[0], "s")
    longest = max(starts[1:])
    if card.is_cuda:
        yield at_most("process group: the longest of the others", longest, _MOST_GROUP_S, "s")
    else:  # other programs may use the cores
        yield Check("process group: the longest of the others", longest, "s")
    yield Check("process group: its end", median(ends), "s")


# ----------------------------------------------------------------------- building, forwards, publishing


def measure_build(card: Card, shape: Shape) -> Iterator[Check]:
    """The most memory while a policy is built, computes and publishes, over that of its float32 weights or state."""
    setup = _setup(card, shape)
    with gang_of_one(card) as gang:
        factory, policies = TorchFactory(0, 100), list[TorchPolicy]()
        before = live_bytes(card.device)
        peak = peak_bytes(card.device, lambda: policies.append(factory.build(_NAME, setup, gang)))
        model_bytes = 4 * shape.parameters
        if card.is_cuda:
            yield at_most("building: peak over the float32 model", (peak - before) / model_bytes, 5.2)
            yield at_most(
                "built: memory over the state", (live_bytes(card.device) - before) / (4 * model_bytes), 1.05
            )
        (policy,) = policies
        yield from _measure_forward(card, shape, policy)
        yield from _measure_published(card, shape, policy)
        factory.release(policy)


def _measure_forward(card: Card, shape: Shape, policy: TorchPolicy) -> Iterator[Check]:
    samples = (
        make_samples(4, 64, 448, shape.vocabulary)
        if card.is_cuda
        else make_samples(2, 4, 8, shape.vocabulary)
    )
    began = perf_counter()
    policy.accumulate(samples)
    synchronize(card.device)
    yield Check("forward and backward: the first one, with compilation", perf_counter() - began, "s")
    at_rest = live_bytes(card.device)
    peak = peak_bytes(card.device, lambda: policy.accumulate(samples))
    yield Check("forward and backward: samples trained", len(samples))
    if card.is_cuda:
        yield Check("forward and backward: peak beyond the state", peak - at_rest, "bytes")
        yield at_most(
            "forward and backward: memory that is left behind",
            live_bytes(card.device) - at_rest,
            _MOST_GROWTH,
            "bytes",
        )


def _measure_published(card: Card, shape: Shape, policy: TorchPolicy) -> Iterator[Check]:
    outline, before = policy.weights_outline(), live_bytes(card.device)
    weights = {name: torch.empty_like(tensor, device="cpu") for name, tensor in outline.items()}
    peak = peak_bytes(card.device, lambda: policy.gather_weights(weights))
    names = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}
    yield holds("published: dtype", ", ".join(sorted(names)), "bfloat16", names == {"bfloat16"})
    if card.is_cuda:
        yield at_most("publishing: peak beyond the state", peak - before, 1.05 * RANGE_BYTES, "bytes")


def measure_alone(card: Card, shape: Shape) -> Iterator[Check]:
    """The same forward without FSDP2, to compare with."""
    policy = TorchFactory(0, 100).host(_NAME, _setup(card, shape), ALONE)
    fill(policy.model)
    yield from (
        Check(f"without a group: {check.name}", check.value, check.unit)
        for check in _measure_forward(card, shape, policy)
    )


# ----------------------------------------------------------------------- suspending and resuming


def suspend_and_resume(card: Card, shape: Shape) -> Iterator[Check]:
    """As a slot does it: the state to the host, the release, the end of the group; a new group, the state again."""
    # Short samples would be compiled once more, for most of a minute; where a state lies does not depend on it.
    setup, factory = _setup(card, shape, compilation=False), TorchFactory(0, 100)
    samples = make_samples(2, 4, 8, shape.vocabulary)
    with gang_of_one(card) as gang:
        policy = factory.build(_NAME, setup, gang)
        policy.accumulate(samples)
        state, step = _to_host(policy)
        factory.release(policy)
        del policy
    factory.free_released()
    suspended, resumed, peaks, seconds = list[int](), list[int](), list[int](), list[float]()
    equal = True
    synchronize(card.device)
    for _ in range(_ROUNDS):
        suspended.append(live_bytes(card.device))
        began = perf_counter()
        with gang_of_one(card) as gang:
            resume = partial(_resume, factory, setup, gang, state, step)
            policies = list[TorchPolicy]()
            peaks.append(peak_bytes(card.device, partial(_add, policies, resume)))
            synchronize(card.device)
            seconds.append(perf_counter() - began)
            resumed.append(live_bytes(card.device))
            equal = equal and _is_equal(_to_host(policies[0])[0], state)
            factory.release(policies.pop())
        factory.free_released()
    yield holds("state after five moves", "equal" if equal else "differs", "every bit", equal)
    yield at_most(
        "suspended: growth of memory in four moves", suspended[-1] - suspended[0], _MOST_GROWTH, "bytes"
    )
    yield at_most("resumed: growth of memory in four moves", resumed[-1] - resumed[0], _MOST_GROWTH, "bytes")
    yield Check("suspended: memory that is kept for the next one", suspended[-1], "bytes")
    yield Check("resuming: seconds, group included", median(seconds))
    if card.is_cuda:
        yield at_most("resuming: peak over the float32 model", max(peaks) / (4 * shape.parameters), 5.2)


def _to_host(policy: TorchPolicy) -> tuple[dict[str, Tensor], TrainingStep]:
    """Copies of the state, and the step with copies of its gradients."""
    step = policy.step_state()
    copies = {name: tensor.cpu().clone() for name, tensor in step.tensors.items()}
    state = {name: tensor.cpu().clone() for name, tensor in policy.base_state().items()}
    return state | copies, TrainingStep(copies, step.data)


def _add(policies: list[TorchPolicy], make: Callable[[], TorchPolicy]) -> None:
    policies.append(make())


def _is_equal(state: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return state.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in state.items()
    )


def _resume(
    factory: TorchFactory, setup: PolicySetup, gang: GangRank, state: Mapping[str, Tensor], step: TrainingStep
) -> TorchPolicy:
    specs = [
        TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), 0)
        for name, tensor in state.items()
    ]
    memory = factory.memory(_NAME, setup, specs)
    for name, tensor in state.items():
        memory[name].copy_(tensor)
    policy = factory.host(_NAME, setup, gang, memory)
    gradients = policy.gradients() if step.tensors else {}
    policy.load_state(TrainingStep(gradients, step.data))
    return policy


def _setup(card: Card, shape: Shape, *, compilation: bool | None = None) -> PolicySetup:
    return setup_of(
        shape, card.device, "bfloat16",
        tokens_per_forward=2048, checkpointing=True, ranks=2, compilation=compilation,
    )  # fmt: skip
