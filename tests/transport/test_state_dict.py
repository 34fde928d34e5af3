"""Tied weights: the trainer and the engines must name them alike."""

import torch

from flexmarl.transport.state_dict import without_ties


def test_a_tied_weight_goes_by_its_first_name() -> None:
    shared, own = torch.zeros(2), torch.zeros(2)
    named = {"embed": shared, "norm": own, "head": shared}
    assert list(without_ties(named)) == ["embed", "norm"]
    assert without_ties(named)["embed"] is shared


def test_equal_is_not_the_same() -> None:
    assert without_ties({"a": (1.0, []), "b": (1.0, [])}) == {"a": (1.0, []), "b": (1.0, [])}


def test_of_a_model_with_tied_layers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    assert list(without_ties(model.state_dict(keep_vars=True))) == ["0.weight"]
