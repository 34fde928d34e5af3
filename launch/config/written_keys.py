"""The keys of a config as its author wrote them, for error messages."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

Location = tuple[int | str, ...]

_KEY = re.compile(r"\b((?:agents|policies)(?:\.\w+)+)(=?)")


class WrittenKeys:
    """Finds the place at which a value of the resolved config was written.

    A value of ``policies.solver`` may be written in ``agents.solver``, and a value of either in ``agent_defaults``.
    ``raw``: the config without ``agent_defaults``, whose content is ``defaults``. ``own_policies``: the policies that
    are written in the agent of their name. ``top``: the part of ``defaults`` that is written at the top level.
    """

    def __init__(
        self,
        raw: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        own_policies: frozenset[str] = frozenset(),
        top: Mapping[str, Any] | None = None,
    ) -> None:
        self._raw, self._defaults = raw or {}, defaults or {}
        self._own_policies, self._top = own_policies, top or {}

    def key(self, *location: int | str) -> str:
        """``agent_defaults.model.path`` for ``policies.solver.model.path``, if it is written there."""
        return ".".join(map(str, self._origin(location)))

    def in_text(self, text: str) -> str:
        """``text`` with the keys in it replaced by those that are written: keys with a value, ``key=value``, by the
        place of the value; others, such as those of a remedy, by their agent's if their policy is an agent's own."""

        def replace(match: re.Match[str]) -> str:
            location = tuple(match[1].split("."))
            return (
                ".".join(map(str, self._origin(location) if match[2] else self._in_agents(location)))
                + match[2]
            )

        return _KEY.sub(replace, text)

    def _origin(self, location: Location) -> Location:
        location = self._in_agents(location)
        if len(location) < 3 or location[0] not in ("agents", "policies"):
            return location
        kind, name, *rest = location
        sections = self._raw.get(str(kind))
        section = sections.get(name) if isinstance(sections, dict) else None
        for length in range(len(rest), 0, -1):  # a missing key is where its section is
            if _holds(section, rest[:length]):
                return (kind, name, *rest)
            if _holds(self._top, rest[:length]):
                return tuple(rest)
            if _holds(self._defaults, rest[:length]):
                return ("agent_defaults", *rest)
        return (kind, name, *rest)

    def _in_agents(self, location: Location) -> Location:
        if len(location) > 1 and location[0] == "policies" and location[1] in self._own_policies:
            return ("agents", *location[1:])
        return location


def _holds(section: Any, path: Sequence[int | str]) -> bool:
    for part in path:
        if not isinstance(section, dict) or part not in section:
            return False
        section = section[part]
    return True
