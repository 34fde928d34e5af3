"""An algorithm's two halves, from one section as an agent with a policy of its own has it; and samples as the rollout
sends them under it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import Sample
from flexmarl.actors.names import AgentName
from flexmarl.actors.rollout.groups.credit_assignment import assign_credit
from flexmarl.actors.sample_id import SampleId
from flexmarl.actors.trainer.trainer_config import LossConfig


@dataclass(frozen=True)
class Algorithm:
    credit: CreditConfig
    loss: LossConfig


def algorithm(**given: Any) -> Algorithm:
    credit = {key: value for key, value in given.items() if key in CreditConfig.model_fields}
    loss = {key: value for key, value in given.items() if key in LossConfig.model_fields or key not in credit}
    return Algorithm(CreditConfig.model_validate(credit), LossConfig.model_validate(loss))


def advantage(reward: float, rewards: Sequence[float], **given: Any) -> float:
    """The advantage of ``reward`` among the ``rewards`` of its group."""
    return algorithm(**given).credit.estimator(rewards)[rewards.index(reward)]


def as_closed(samples: Sequence[Sample], credit: Mapping[AgentName, CreditConfig]) -> list[Sample]:
    """``samples`` in their order, with the advantages that they have when their groups close. All turns of a trajectory
    have one reward by agent, if that is compared."""
    closed: dict[str, Sample] = {}
    for group in dict.fromkeys(sample.group for sample in samples):
        members = [sample for sample in samples if sample.group == group]
        rewards: dict[AgentName, dict[int, float]] = {}
        for sample in members:
            trajectory = SampleId.parse(sample.sample_id).trajectory
            rewards.setdefault(AgentName(sample.agent), {})[trajectory] = sample.reward
        closed |= {sample.sample_id: sample for sample in assign_credit(members, credit, rewards)}
    return [closed[sample.sample_id] for sample in samples]
