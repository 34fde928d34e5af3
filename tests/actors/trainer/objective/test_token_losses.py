"""Every row of the algorithms has a loss, and every loss a row."""

import pkgutil

import pytest

from flexmarl.actors.credit.algorithms import ALGORITHMS
from flexmarl.actors.trainer.objective import losses
from flexmarl.actors.trainer.objective.token_losses import token_loss_of


def test_every_file_of_a_loss_is_the_loss_of_an_algorithm() -> None:
    files = {module.name for module in pkgutil.iter_modules(losses.__path__)}
    assert files == {row.surrogate for row in ALGORITHMS.values()}
    for name in files:
        assert token_loss_of(name).__module__.endswith(f".losses.{name}")


def test_a_name_without_a_file_is_an_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        token_loss_of("nothing")
