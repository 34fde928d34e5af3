"""The policies of one process: their memory when they leave."""

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from flexmarl.actors.messages import GangPlace
from flexmarl.actors.recipe.recipe import RecipeConfig
from flexmarl.actors.trainer.backends.torch_policy.gang_meeting import LOOPBACK, Meeting
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import GangRank
from flexmarl.actors.trainer.pool.slot import Slot
from flexmarl.actors.trainer.trainer_setup import TrainerSetup

from ..backends.torch_policy.gang_cases import SETUPS
from ..backends.torch_policy.policies import make_samples
from ..backends.torch_policy.ranks import NAME, Ranks

RECIPE = """
async def workflow(query, agents): ...
def train_query(position, seed): ...
def eval_queries(seed): ...
"""


def models_after_release(_alone: GangRank, folder: Path, place: GangPlace) -> int:
    """The models that are left of a gang that has trained and was released, without a collection by chance."""
    # The recipe needs no data, and nothing is asked of the store.
    setup = TrainerSetup(
        {NAME: SETUPS["critic"]},
        RecipeConfig(folder=str(folder), data={}, seed=1),
        10,
        cast(Any, None),
        folder,
    )
    slot = Slot(setup)
    slot._tokenizers[NAME] = cast(Any, None)
    gc.collect()
    gc.disable()
    try:
        policy: Any = slot.host(NAME, place)
        policy.accumulate(make_samples(1))
        models = [policy.models.completions.model, policy.models.critic.model, policy.models.reference.model]
        alive = [weakref.ref(model) for model in models]
        del policy, models
        slot.release(NAME)
        return sum(each() is not None for each in alive)
    finally:
        gc.enable()


def test_a_gang_that_is_released_leaves_no_model_in_memory(tmp_path: Path) -> None:
    (tmp_path / "workflow.py").write_text(RECIPE)
    ranks = Ranks(2)
    meeting = Meeting(LOOPBACK)
    places = [GangPlace(rank, 2, meeting.address) for rank in range(2)]
    assert ranks.run_alone(models_after_release, *((tmp_path, place) for place in places)) == [0, 0]
    ranks.close()
    meeting.close()


def test_a_policy_that_is_released_has_left_its_gang_before_others_get_its_memory() -> None:
    order: list[str] = []
    slot = Slot.__new__(Slot)
    stub = cast(Any, slot)
    stub._hosted, stub._memberships, stub._meetings = {NAME: "backend"}, {}, {}
    stub._memberships[NAME] = SimpleNamespace(leave=lambda: order.append("leave"))
    stub._factory = SimpleNamespace(
        release=lambda backend: order.append(backend), free_released=lambda: order.append("free")
    )
    slot.release(NAME)
    assert order == ["leave", "backend", "free"]
