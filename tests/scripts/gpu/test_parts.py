"""The parts of a test."""

from collections.abc import Iterator

from scripts.gpu.checks import Check, LeftOut, at_most
from scripts.gpu.parts import run_parts


def part(error: Exception | None) -> Iterator[Check]:
    yield at_most("before", 1.0, 2.0)
    if error is not None:
        raise error


def test_an_error_in_a_part_is_its_check_and_the_next_one_runs() -> None:
    parts = {
        "full_cache": part(ValueError("no room")),
        "small": part(LeftOut("one card")),
        "last": part(None),
    }
    assert [(check.name, check.value, check.passed) for check in run_parts(**parts)] == [
        ("before", 1.0, True),
        ("full cache: ended", "ValueError: no room", False),
        ("before", 1.0, True),
        ("small: left out", "one card", None),
        ("before", 1.0, True),
    ]
