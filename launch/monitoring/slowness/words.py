"""Findings as lines for people. Pure."""

from collections.abc import Sequence
from typing import Final

from ..formatting import duration
from .finding import Finding

_MOST: Final = 3


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """The first three findings below a title, each with the seconds of a step that it may cost; empty without any."""
    if not findings:
        return []
    return [
        "time and learning of the newest steps",
        *(f"  {finding_words(finding)}" for finding in findings[:_MOST]),
    ]


def finding_words(finding: Finding) -> str:
    """``finding``, behind the seconds of a step that it may cost."""
    seconds = finding.seconds_per_step
    cost = "" if seconds is None or not finding.key else f"up to {duration(seconds)} a step: "
    return f"{cost}{finding}"
