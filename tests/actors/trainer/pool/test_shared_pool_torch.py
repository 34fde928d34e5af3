"""Policies of PyTorch that share a slot: what they learn is bit for bit what they learn in a static pool."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import LoraConfig, ModelConfig
from flexmarl.actors.names import AgentName, PolicyName, Step, Version
from flexmarl.actors.trainer.pool.pool_config import SharedPoolConfig
from flexmarl.actors.trainer.trainer_config import LossConfig, OptimizerConfig, SftConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from flexmarl.launch.config.config_reading import RECIPES

from ..pools import JUDGE, RECIPE, SOLVER, Fate, House, house

torch.set_num_threads(1)
ARCHITECTURE = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 14,
    "tie_word_embeddings": False, "max_position_embeddings": 32,
}  # fmt: skip
TOKENIZER = str(RECIPES / "sort_digits" / "tokenizer")
RECIPE_OF_DIGITS = RECIPE.replace("12", "12=")


def policy(
    agent: str,
    dtype: str = "float32",
    hidden: int = 32,
    lora: LoraConfig | None = None,
    updates: int = 1,
    **loss: Any,
) -> PolicySetup:
    credit = CreditConfig(name=loss.get("name", "grpo"))
    architecture = {**ARCHITECTURE, "hidden_size": hidden}
    return PolicySetup(
        model=ModelConfig(config=architecture, tokenizer=TOKENIZER, dtype=dtype),
        lora=lora,
        optimizer=OptimizerConfig(lr=1e-2, schedule="linear"),
        credit={AgentName(agent): credit},
        loss=LossConfig(**loss),
        sft=SftConfig(batches=1, batch_size=4),
        updates=updates,
    )


EQUAL = "equal shapes"
MIXES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    EQUAL: ({}, {}),
    "bfloat16 and other shapes": ({"dtype": "bfloat16"}, {"hidden": 64}),
    "critic and reference": ({"name": "ppo", "kl_coefficient": 0.1}, {"kl_coefficient": 0.1}),
    "adapters over one base": (
        {"lora": LoraConfig(), "kl_coefficient": 0.1},
        {"lora": LoraConfig(rank=2), "name": "ppo"},
    ),
    "an adapter beside full weights": ({"lora": LoraConfig()}, {}),
    "held samples": ({"name": "reinforce_pp", "kl_coefficient": 0.1}, {}),
    "several updates": ({"updates": 3, "name": "ppo", "kl_coefficient": 0.1}, {"updates": 2}),
    "several updates of held samples": (
        {"updates": 2, "name": "reinforce_pp"},
        {"updates": 2, "old_policy": "behaviour"},
    ),
}


STATES: dict[str, tuple[int, ...]] = {
    EQUAL: (1, 2),
    "adapters over one base": (1, 2),
    "an adapter beside full weights": (2,),
    "held samples": (2,),
    "several updates": (2,),
}
"""States that a slot keeps at a time, where it is not one alone."""
ONE_STATE = SharedPoolConfig(slots=1, states_per_slot=1)


async def trained(home: House, names: Sequence[PolicyName] = (SOLVER, JUDGE)) -> dict[PolicyName, Any]:
    """Losses, and digests of the saved files, after steps whose micro-batches alternate between the policies."""
    found: dict[PolicyName, list[Any]] = {name: [] for name in names}
    for name in found:
        found[name].append(await home.trainer.sft(name, 0, 2))
        await home.trainer.publish(name)
    for step in (1, 2):
        for name in found:
            await home.put(name, step, 6, prompt=(1, 2, 10))
        for count in (2, 1, 3):
            for name in found:
                await home.trainer.train(name, Version(step - 1), count)
        for name in found:
            stepped = (await home.trainer.optimizer_step(name, Step(step))).stats
            compared = ("loss", "grad_norm", "ratio_deviation", "old_ratio_deviation", "value_loss")
            found[name].append([stepped.figures.get(figure) for figure in compared])
    for name in found:
        folder = home.folder / "saved" / name
        await home.trainer.save(name, str(folder))
        files = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
        found[name].append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files})
    return found


def run(
    folder: Path, mix: str, config: SharedPoolConfig | None, fate: Fate | None = None, *, apart: bool = False
) -> dict[PolicyName, Any]:
    first, second = MIXES[mix]
    policies = {SOLVER: policy("solver", **first), JUDGE: policy("judge", **second)}

    async def main() -> dict[PolicyName, Any]:
        async with house(folder, policies, config, fate, RECIPE_OF_DIGITS, apart=apart) as home:
            return await trained(home)

    return asyncio.run(main())


@pytest.mark.parametrize("mix", MIXES)
def test_policies_that_alternate_on_one_slot_learn_the_same_bit_for_bit(tmp_path: Path, mix: str) -> None:
    static = run(tmp_path / "static", mix, None)
    for states in STATES.get(mix, (1,)):
        fate = Fate()
        assert (
            run(tmp_path / f"shared-{states}", mix, SharedPoolConfig(slots=1, states_per_slot=states), fate)
            == static
        )
        assert fate.calls.count("suspend") >= 10


@dataclass(frozen=True)
class Undisturbed:
    """A run without a loss: its results, and the calls to its slot worker."""

    mix: str
    found: dict[PolicyName, Any]
    calls: list[str]
    is_apart: bool = False

    def check_loss(self, folder: Path, call: str, *, before: bool) -> None:
        """Asserts that a run whose slot worker dies in its last ``call`` has the same results."""
        last = max(number for number, name in enumerate(self.calls, 1) if name == call)
        fate = Fate(dies_at=last, before=before)
        assert run(folder, self.mix, ONE_STATE, fate, apart=self.is_apart) == self.found
        assert fate.killed == ["slot-0"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Undisturbed:
    fate = Fate()
    return Undisturbed(
        request.param, run(tmp_path_factory.mktemp("whole"), request.param, ONE_STATE, fate), fate.calls
    )


# The mixes have a mark of their own: in one with the calls, pytest makes the fixture again for each case.
@pytest.mark.parametrize("undisturbed", ["critic and reference", "several updates"], indirect=True)
@pytest.mark.parametrize(
    ("call", "acts_with"),
    [
        ("resume", "several updates"),
        ("accumulate", "critic and reference"),
        ("suspend", "several updates"),
        ("optimizer_step", "critic and reference"),
        ("set_weights", "several updates"),
        ("set_rest", "critic and reference"),
    ],
)
def test_a_slot_worker_that_dies_changes_no_bit(
    tmp_path: Path, undisturbed: Undisturbed, call: str, acts_with: str
) -> None:
    """Before its answer with one mix, before it acts with the other."""
    undisturbed.check_loss(tmp_path / "lost", call, before=undisturbed.mix != acts_with)


# ----------------------------------------------------------------------- slots on other hosts


@pytest.fixture(scope="module")
def undisturbed_apart(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Undisturbed:
    folder, fate = tmp_path_factory.mktemp("apart"), Fate()
    found = run(folder, request.param, ONE_STATE, fate, apart=True)
    assert not list(folder.glob("host-*/*.arena"))
    return Undisturbed(request.param, found, fate.calls, is_apart=True)


@pytest.mark.parametrize("undisturbed_apart", ["critic and reference", EQUAL], indirect=True)
def test_states_that_resume_on_other_hosts_learn_the_same_bit_for_bit(
    tmp_path: Path, undisturbed_apart: Undisturbed
) -> None:
    assert undisturbed_apart.found == run(tmp_path / "static", undisturbed_apart.mix, None)
    calls = undisturbed_apart.calls
    assert calls.count("forget_copies") >= calls.count("set_rest")
    assert calls.count("suspend") >= 10


def test_a_state_whose_host_is_lost_resumes_on_another_one(tmp_path: Path) -> None:
    async def main(folder: Path, fate: Fate) -> tuple[Any, list[Any]]:
        config = SharedPoolConfig(slots=2, states_per_slot=1)
        policies = {SOLVER: policy("solver")}
        async with house(folder, policies, config, fate, RECIPE_OF_DIGITS, apart=True) as home:
            found = await trained(home, [SOLVER])
            return found, [event["slots"] for event in home.listener.events if "slots" in event]

    calls = Fate()
    whole, _ = asyncio.run(main(tmp_path / "whole", calls))
    last = max(number for number, name in enumerate(calls.calls, 1) if name == "accumulate")
    found, slots = asyncio.run(main(tmp_path / "lost", Fate(dies_at=last)))
    assert found == whole
    assert slots == ["slot-1"]


@pytest.mark.parametrize("undisturbed_apart", [EQUAL], indirect=True)
@pytest.mark.parametrize(
    ("call", "before"),
    [
        ("suspend", True),
        ("suspend", False),
        ("set_weights", False),
        ("set_rest", True),
        ("set_rest", False),
        ("forget_copies", True),
    ],
)
def test_a_slot_of_another_host_that_dies_changes_no_bit(
    tmp_path: Path, undisturbed_apart: Undisturbed, call: str, before: bool
) -> None:
    """Before it acts, or before its answer."""
    undisturbed_apart.check_loss(tmp_path / "lost", call, before=before)
