"""T8 over gloo."""

from dataclasses import replace

import pytest

from scripts.gpu import lost_member
from scripts.gpu.checks import Card
from scripts.gpu.lost_member import CASES, run, wait_for_member

_READY = "import sys; print('ready', flush=True)"
"""In place of a rank that imports torch: the tests of the verdicts need no gang."""


def test_a_rank_that_waits_in_vain_ends_with_a_sentence(card: Card) -> None:
    checks = {check.name: check for check in run(card)}
    assert checks["no other comes: end"].passed, checks
    assert "of the 2 ranks of a policy these have not come" in str(checks["no other comes: end"].value)
    assert checks["lost before the group: end"].passed, checks


def test_the_limit_of_a_rank_that_waits_grows_with_that_of_the_test(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_member, "_PROGRAM", f"{_READY}; import time; time.sleep(1000)")
    (check,) = wait_for_member(replace(card, limit_factor=1 / 256), CASES[0])
    assert check.passed is False and check.value == "it still waits after 1.09375 s"


def test_other_words_fail_unless_they_are_only_recorded(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    error = {"error": "TimeoutError: of the 2 ranks these have not come: 1"}
    monkeypatch.setattr(
        lost_member, "_PROGRAM", f"{_READY}; import json; print(json.dumps({error})); sys.exit(3)"
    )
    assert next(wait_for_member(card, CASES[0])).passed is True
    case = replace(CASES[0], words="a flood")
    assert next(wait_for_member(card, case)).passed is False
    assert next(wait_for_member(card, replace(case, recorded_only=True))).passed is None
