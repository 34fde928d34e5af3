"""An algorithm's two halves, from one section as an agent with a policy of its own has it."""

from dataclasses import dataclass
from typing import Any

from flexmarl.actors.trainer.trainer_config import CreditConfig, LossConfig, divided_algorithm


@dataclass(frozen=True)
class Algorithm:
    credit: CreditConfig
    loss: LossConfig


def algorithm(**given: Any) -> Algorithm:
    credit, loss = divided_algorithm(given)
    return Algorithm(CreditConfig.model_validate(credit), LossConfig.model_validate(loss))
