"""launch/docs/embedding.md has the signatures and all public members of the names that it explains."""

import inspect
import re
from collections.abc import Callable

import pytest

import flexmarl
from flexmarl.launch.run.connected_run import ConnectedRun

from .checkouts import ROOT

TEXT = (ROOT / "launch" / "docs" / "embedding.md").read_text()
FOR_COMMANDS = {"from_prepared"}  # makes a Run of what the command line has prepared


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("flexmarl.Run", flexmarl.Run),
        ("flexmarl.Run.resume", flexmarl.Run.resume),
        ("flexmarl.connect", flexmarl.connect),
        ("flexmarl.NodeRequest", flexmarl.NodeRequest),
        ("flexmarl.Samples", flexmarl.Samples),
    ],
)
def test_a_signature_is_that_of_the_code(name: str, function: Callable[..., object]) -> None:
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        default = parameter.default
        if default is parameter.empty:
            parts.append(parameter.name)
        elif isinstance(default, flexmarl.NodeRequest):
            parts.append(f"{parameter.name}=NodeRequest()")
        else:
            parts.append(f"{parameter.name}={default!r}".replace("'", '"'))
    assert f"{name}({', '.join(parts)})" in TEXT


@pytest.mark.parametrize("owner", [flexmarl.Run, ConnectedRun], ids=lambda owner: owner.__name__)
def test_every_public_member_is_on_the_page(owner: type) -> None:
    members = {name for name in vars(owner) if not name.startswith("_")} - FOR_COMMANDS
    assert len(members) > 6
    assert {name for name in members if not re.search(rf"`[^`]*\b{name}\b", TEXT)} == set()


def test_every_name_of_the_front_door_is_on_the_page() -> None:
    assert {name for name in flexmarl.__all__ if f"`flexmarl.{name}`" not in TEXT} == set()
