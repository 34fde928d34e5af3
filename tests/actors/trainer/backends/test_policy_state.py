"""A policy's state, moved to another backend between any two calls: both backends, every kind of state."""

import copy
import random
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.errors import NoRoomForState
from flexmarl.actors.messages import LoraConfig, ModelConfig, Sample, StepStats
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.backend_config import SimulatedTrainerConfig
from flexmarl.actors.trainer.backends.backend_factory import BackendFactory
from flexmarl.actors.trainer.backends.policy_backend import PolicyBackend, TrainingStep
from flexmarl.actors.trainer.backends.simulated_factory import SimulatedFactory
from flexmarl.actors.trainer.backends.torch_policy import torch_factory, torch_policy
from flexmarl.actors.trainer.backends.torch_policy.torch_factory import TorchFactory
from flexmarl.actors.trainer.trainer_config import LossConfig, OptimizerConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from flexmarl.transport.handle import TensorSpec

from .torch_policy.policies import MODEL, SMALLER_MODEL

NAME = PolicyName("solver")
LORA = LoraConfig(rank=2, alpha=4)
OPTIMIZER = OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), schedule="linear", weight_decay=0.01)


def torch_setup(
    algorithm: dict[str, Any],
    *,
    dtype: str = "float32",
    optimizer: OptimizerConfig = OPTIMIZER,
    lora: LoraConfig | None = None,
    updates: int = 1,
    **model: Any,
) -> PolicySetup:
    return PolicySetup(
        model=ModelConfig(config=SMALLER_MODEL | model, tokenizer="unused", dtype=dtype),
        lora=lora,
        credit={AgentName("solver"): CreditConfig(name=algorithm["name"])},
        loss=LossConfig(**algorithm),
        optimizer=optimizer,
        updates=updates,
    )


SETUPS = {
    "torch": torch_setup({"name": "dapo"}),
    "reference": torch_setup({"name": "grpo", "kl_coefficient": 0.1}),
    "critic": torch_setup({"name": "ppo", "kl_coefficient": 0.1}),
    "held": torch_setup({"name": "reinforce_pp", "kl_coefficient": 0.1}),
    "updates": torch_setup({"name": "dapo"}, updates=3),
    "updates, critic": torch_setup({"name": "ppo", "kl_coefficient": 0.1}, updates=2),
    "updates, held": torch_setup({"name": "reinforce_pp"}, updates=2),
    "bfloat16": torch_setup({"name": "dapo"}, dtype="bfloat16"),
    "tied": torch_setup({"name": "dapo"}, tie_word_embeddings=True),
    "lora": torch_setup({"name": "dapo"}, lora=LORA),
    "lora, reference": torch_setup(
        {"name": "grpo", "kl_coefficient": 0.1}, lora=LORA, tie_word_embeddings=True
    ),
    "lora, critic": torch_setup({"name": "ppo", "kl_coefficient": 0.1}, lora=LORA),
    "simulated": PolicySetup(
        trainer=SimulatedTrainerConfig(), credit={AgentName("solver"): CreditConfig(name="dapo")}
    ),
}
WIDER = torch_setup({"name": "dapo"}, hidden_size=MODEL["hidden_size"])


def factory_of_kind(kind: str, seed: int = 0) -> BackendFactory:
    """``seed`` decides nothing that moves; but a random base, which does not move, is the run's."""
    seed = 0 if SETUPS[kind].lora else seed
    return SimulatedFactory(seed) if kind == "simulated" else TorchFactory(seed, 10)


def samples(version: int, seed: int) -> list[Sample]:
    rng = random.Random(seed)
    made = []
    for trajectory in range(4):
        tokens = tuple(rng.randrange(16) for _ in range(rng.randrange(1, 9)))
        made.append(
            Sample(
                f"{version}:q{seed}_0_{trajectory}", "solver", version, version, f"{version}:q{seed}",
                float(trajectory % 2), trajectory % 2 - 0.5, (1, 2, 3), tokens,
                tuple(rng.uniform(-3.2, -2.4) for _ in tokens), columns={"scores": np.ones(3)},
                query_position=trajectory,
            )
        )  # fmt: skip
    return made


def moved(policy: PolicyBackend, to: PolicyBackend) -> PolicyBackend:
    """``to``, with the state of ``policy`` as it would come over a wire."""
    base = {name: copy.deepcopy(tensor) for name, tensor in policy.base_state().items()}
    step = policy.step_state()
    data = msgpack.unpackb(msgpack.packb(step.data), strict_map_key=False)
    tensors = {name: copy.deepcopy(tensor) for name, tensor in step.tensors.items()}
    live = to.base_state()
    assert live.keys() == base.keys()
    for name, tensor in base.items():
        live[name][...] = tensor
    to.load_state(TrainingStep(tensors, data))
    return to


def array(tensor: Any) -> NDArray[Any]:
    """A copy."""
    return np.array(tensor.numpy() if isinstance(tensor, torch.Tensor) else tensor)


def state(policy: PolicyBackend) -> dict[str, Any]:
    step = policy.step_state()
    tensors = {**policy.base_state(), **step.tensors}
    return {name: array(tensor) for name, tensor in tensors.items()} | step.data


def differences(first: PolicyBackend, second: PolicyBackend) -> list[str]:
    left, right = state(first), state(second)
    assert left.keys() == right.keys()
    return [name for name in left if not np.array_equal(left[name], right[name])]


def dirty(made: BackendFactory, setup: PolicySetup) -> None:
    """Leaves the memory of another policy, with a gradient and other settings, to the next that is hosted."""
    other = setup.model_copy(update={"optimizer": OptimizerConfig(betas=(0.5, 0.5), weight_decay=0.5)})
    policy = made.build(PolicyName("other"), other)
    policy.accumulate(samples(0, 99))
    made.release(policy)


# A run of three steps, call by call: the micro-batches of a step, then the step.
CALLS: list[Callable[[PolicyBackend], Any]] = [
    call
    for step in range(3)
    for call in (
        lambda policy, step=step: policy.accumulate(samples(step, 2 * step)),
        lambda policy, step=step: policy.accumulate(samples(step, 2 * step + 1)),
        lambda policy: policy.optimizer_step(),
    )
]


@pytest.mark.parametrize("kind", SETUPS)
@settings(max_examples=3)
@given(used=st.booleans(), cuts=st.sets(st.integers(0, len(CALLS)), min_size=2, max_size=3))
def test_a_state_moved_between_any_two_calls_continues_bit_for_bit(
    kind: str, used: bool, cuts: set[int]
) -> None:
    """It moves to new memory and to used memory in turn. ``used``: to used memory first."""
    setup, made = SETUPS[kind], factory_of_kind(kind)
    unbroken = made.build(NAME, setup)
    policy = factory_of_kind(kind).build(NAME, setup)
    for number in range(len(CALLS) + 1):
        if number in cuts:
            elsewhere = factory_of_kind(kind, seed=7)
            if used:
                dirty(elsewhere, setup)
            used = not used
            policy = moved(policy, elsewhere.host(NAME, setup))
            assert differences(policy, unbroken) == []
        if number < len(CALLS):
            expected, found = CALLS[number](unbroken), CALLS[number](policy)
            if isinstance(expected, StepStats):
                assert asdict(found) == asdict(expected)
    assert policy.version == 3 and differences(policy, unbroken) == []


@pytest.mark.parametrize("kind", ["torch", "critic", "simulated"])
def test_a_state_within_the_sft_continues_bit_for_bit(kind: str) -> None:
    setup, made = SETUPS[kind], factory_of_kind(kind)
    unbroken, policy = made.build(NAME, setup), made.build(NAME, setup)
    examples = [((1, 2), (3, 4)), ((2,), (5,))]
    for number in range(3):
        expected = unbroken.sft(examples)
        assert policy.sft(examples) == expected
        policy = moved(policy, factory_of_kind(kind, seed=7).host(NAME, setup))
        if number == 0 and kind != "simulated":
            with pytest.raises(RuntimeError, match="sft_done"):
                policy.accumulate(samples(0, 1))
    for each in (policy, unbroken):
        each.sft_done()
        each.accumulate(samples(0, 1))
    assert differences(policy, unbroken) == []


@pytest.mark.parametrize("kind", SETUPS)
def test_the_base_changes_by_steps_alone_and_the_step_has_a_gradient_if_there_is_one(kind: str) -> None:
    policy = factory_of_kind(kind).build(NAME, SETUPS[kind])
    before = {name: array(tensor) for name, tensor in policy.base_state().items()}
    assert policy.step_state().tensors == {}
    policy.accumulate(samples(0, 1))
    assert bool(policy.step_state().tensors) == ("held" not in kind)
    assert all(np.array_equal(array(tensor), before[name]) for name, tensor in policy.base_state().items())
    live = policy.base_state()
    policy.optimizer_step()
    assert policy.step_state().tensors == {}
    assert not all(np.array_equal(array(tensor), before[name]) for name, tensor in live.items()), (
        "they are live"
    )


@pytest.mark.parametrize("kind", ["torch", "critic", "held", "simulated"])
def test_the_last_base_and_its_position_are_a_state_to_return_to(kind: str) -> None:
    setup, made = SETUPS[kind], factory_of_kind(kind)
    policy = made.build(NAME, setup)
    policy.accumulate(samples(0, 1))
    policy.optimizer_step()
    base = copy.deepcopy(dict(policy.base_state()))
    step = policy.step_state()
    policy.accumulate(samples(1, 2))
    expected = policy.optimizer_step()
    for name, tensor in policy.base_state().items():
        tensor[...] = base[name]
    policy.load_state(step)
    policy.accumulate(samples(1, 2))
    assert policy.optimizer_step() == expected and policy.version == 2


@pytest.mark.parametrize("kind", ["torch", "simulated"])
def test_a_step_that_does_not_fit_is_refused_by_name_and_changes_nothing(kind: str) -> None:
    policy, other = (factory_of_kind(kind).build(NAME, SETUPS[kind]) for _ in range(2))
    for each in (policy, other):
        each.accumulate(samples(0, 1))
    good = policy.step_state()
    name = next(iter(good.tensors))
    bad = [
        replace(good, tensors={}),
        replace(good, tensors={**good.tensors, "unknown": good.tensors[name]}),
        replace(good, data={"unknown": 1}),
        replace(good, data=good.data | {"unknown": 1}),
    ]
    if kind == "torch":
        bad += [
            replace(good, tensors={**good.tensors, name: torch.zeros(3)}),
            replace(good, tensors={**good.tensors, name: good.tensors[name].double()}),
            replace(good, data=good.data | {"version": "new"}),
        ]
    for step in bad:
        with pytest.raises(ValueError, match="gradient|unknown|version|tensors"):
            policy.load_state(step)
    assert differences(policy, other) == []


def test_memory_is_kept_for_policies_of_the_same_tensors_alone() -> None:
    made = TorchFactory(0, 10)
    first = made.build(NAME, SETUPS["torch"])
    memory = first.model
    made.release(first)
    again = made.host(PolicyName("other"), torch_setup({"name": "grpo"}, optimizer=OptimizerConfig(lr=1.0)))
    assert again.model is memory
    assert made.host(NAME, SETUPS["torch"]).model is not memory, "it is in use"
    for setup in (WIDER, SETUPS["critic"]):
        made.release(again)
        assert made.host(NAME, setup).model is not memory
        again = made.host(NAME, SETUPS["torch"])
        assert again.model is not memory, "it has made room"
        memory = again.model
    made.release(again)
    made.release(made.build(NAME, WIDER))
    assert made.host(NAME, SETUPS["torch"]).model is not memory, "the latest alone is kept"


@pytest.mark.parametrize("how", ["host", "build", "memory"])
def test_memory_that_is_kept_is_freed_before_a_policy_takes_other_memory(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A device with room for one state has none for the one that was left there. A policy that is built is not given
    memory: what an equal one has left is in its way too."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    made = TorchFactory(0, 10)
    first = made.build(NAME, SETUPS["torch"])
    left = [weakref.ref(tensor) for tensor in first.models.parameters.values()]
    made.release(first)
    del first
    is_freed: list[bool] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            is_freed.append(all(tensor() is None for tensor in left))
            return function(*arguments, **settings)

        return call

    for module, name in (
        (torch_factory, "TrainedModels"),
        (torch_policy, "TrainedModels"),
        (torch_factory, "new_memory"),
    ):
        monkeypatch.setattr(module, name, noting(getattr(module, name)))
    match how:
        case "host":
            made.host(NAME, WIDER)
        case "build":
            made.build(PolicyName("other"), SETUPS["torch"])
        case _:
            made.memory(NAME, SETUPS["torch"], [TensorSpec("w", (3,), "float32", 0)])
    assert is_freed == [True]


@pytest.mark.parametrize("how", ["host", "build", "memory"])
def test_a_device_without_memory_for_a_state_names_the_settings_that_take_less(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def fail(*_arguments: Any, **_settings: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 980.00 MiB")

    for module, name in (
        (torch_factory, "TrainedModels"),
        (torch_policy, "TrainedModels"),
        (torch_factory, "new_memory"),
    ):
        monkeypatch.setattr(module, name, fail)
    made, setup = TorchFactory(0, 10), SETUPS["torch"]
    arguments: tuple[Any, ...] = (NAME, setup, []) if how == "memory" else (NAME, setup)
    with pytest.raises(NoRoomForState, match=r"solver: .*pool.states_per_slot=1.*trainer.ranks.*CUDA out of"):
        getattr(made, how)(*arguments)
