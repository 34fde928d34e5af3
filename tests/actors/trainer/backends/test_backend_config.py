"""The numbers of processes that a policy is divided over."""

import pytest
from pydantic import ValidationError

from flexmarl.actors.trainer.backends.backend_config import TorchTrainerConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 2, "min_ranks": 3}, "min_ranks=3 is more than ranks=2"),
        (
            {"ranks": 6, "replicas": 4},
            "replicas=4 do not divide ranks=6: each needs as many ranks as the others",
        ),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TorchTrainerConfig.model_validate(settings)


def test_a_gang_has_as_many_replicas_as_are_whole() -> None:
    trainer = TorchTrainerConfig(ranks=6, min_ranks=2, replicas=2)
    assert [trainer.replicas_of(ranks) for ranks in (2, 3, 4, 5, 6)] == [1, 1, 1, 1, 2]
    assert trainer.fewest_parts == 2 and TorchTrainerConfig(ranks=6, replicas=2).fewest_parts == 3
    assert TorchTrainerConfig(ranks="auto", replicas=2).replicas == 2
