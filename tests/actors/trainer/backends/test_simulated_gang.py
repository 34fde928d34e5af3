"""Ranks of a simulated policy that meet in a process group."""

from collections.abc import Iterator

import pytest

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.errors import ProtocolViolation
from flexmarl.actors.messages import GangPlace, Sample
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.backend_config import SimulatedTrainerConfig
from flexmarl.actors.trainer.backends.simulated_factory import SimulatedFactory
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import GangRank
from flexmarl.actors.trainer.trainer_setup import PolicySetup

from .torch_policy.ranks import Ranks

SOLVER = PolicyName("solver")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(2)
    yield made
    made.close()


def train(gang: GangRank, other_rank_has: str) -> dict[int, list[str]] | str:
    """The samples that a rank has trained, or the words of a refusal. ``other_rank_has``: that of the second rank."""
    trainer = SimulatedTrainerConfig(ranks=2, process_group=True)
    setup = PolicySetup(trainer=trainer, credit={AgentName("solver"): CreditConfig()})
    policy = SimulatedFactory(0, has_groups=True).build(SOLVER, setup, gang)
    name = other_rank_has if gang.rank else "a"
    try:
        policy.accumulate([Sample(name, "solver", 1, 0, "1:q", 1.0, 0.5, (1,), (2,), (-1.0,))])
        policy.optimizer_step()
    except ProtocolViolation as error:
        return str(error)
    return policy.trained


def test_ranks_that_train_the_same_samples_stay_together(ranks: Ranks) -> None:
    assert ranks.run(2, train, "a") == [{0: ["a"]}] * 2


def test_a_rank_that_has_trained_another_sample_is_noticed(ranks: Ranks) -> None:
    assert ranks.run(2, train, "b") == ["policy solver: the ranks have trained other samples"] * 2


def test_without_groups_a_gang_has_neither_meeting_nor_members() -> None:
    factory = SimulatedFactory(0)
    assert factory.open_meeting("127.0.0.1") is None
    assert factory.membership(PolicySetup(credit={}), GangPlace(0, 2, "unused")) is None
