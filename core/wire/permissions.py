"""The calls that a client of an allow-list may make, as a list of rules:

*                 every endpoint of every actor, except those of ``system``
greeter           every endpoint of the actor ``greeter``
greeter:greet     this endpoint of it
system            every endpoint of ``system``: the client may stop the process, and admit others
system:lookup     finding actors by name
"""

import re
from collections.abc import Iterable

from ..base.names import checked_name

DEFAULT_CALLS = ("*",)
"""Those of a client for which there are no rules."""

# The actor that controls its process.
_SYSTEM = "system"
_ENDPOINT = re.compile(r"[A-Za-z_]\w*")


def checked_calls(calls: Iterable[str]) -> tuple[str, ...]:
    """Rules in order, each once. Raises ValueError if one is invalid."""
    if isinstance(calls, str):
        raise ValueError(f"calls is a list of rules, such as [{calls!r}]")
    rules = tuple(sorted(set(calls)))
    for rule in rules:
        actor, colon, endpoint = rule.partition(":")
        if rule == "*":
            continue
        checked_name(actor)
        if colon and not _ENDPOINT.fullmatch(endpoint):
            raise ValueError(f"invalid rule {rule!r}: use '*', an actor's name, or 'actor:endpoint'")
    return rules


def may_call(calls: tuple[str, ...], actor: str, endpoint: str) -> bool:
    """True if one of the rules ``calls`` permits a call of ``endpoint`` of ``actor``."""
    return (actor != _SYSTEM and "*" in calls) or actor in calls or f"{actor}:{endpoint}" in calls
