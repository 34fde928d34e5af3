"""The rules about names, held against the package; and small samples, held against the checker."""

import pytest

from .names import EXCEPTIONS, check, hanging_comments, sources, violations


def test_the_package_keeps_the_rules() -> None:
    """Apart from the exceptions, each of which still stands as often as the list says."""
    places = violations()
    more = [place for name in places for place in places[name] if len(places[name]) > EXCEPTIONS.get(name, 0)]
    assert not more, "\n".join(["more than tests/names.py excepts:", *more])
    counts = {name: len(lines) for name, lines in places.items()}
    fewer = {name: counts.get(name, 0) for name in EXCEPTIONS if counts.get(name, 0) < EXCEPTIONS[name]}
    assert not fewer, f"fewer than tests/names.py excepts: lower these numbers there: {fewer}"


def test_no_comment_hangs_behind_a_bracket() -> None:
    folders = ("core", "transport", "actors", "launch", "tests", "scripts/bench")
    lines = [line for path, source in sources(folders) for line in hanging_comments(path, source)]
    assert not lines, "\n".join(["", *lines])


@pytest.mark.parametrize(
    "source",
    [
        "found = f()",
        "for one in x: pass",
        "def f(own): pass",
        "def f(*others): pass",
        "self._known = 1",
        "def here(): pass",
        "with x as taken: pass",
        "def opened(): pass",
        "def _now_lent(): pass",
        "async def _made_asked(): pass",
        "class A:\n    def _checked(self): pass",
    ],
)
def test_a_violation_is_named(source: str) -> None:
    ((_, place),) = check("core/x.py", source)
    assert place.startswith(f"core/x.py:{source.count(chr(10)) + 1}: ")


@pytest.mark.parametrize(
    "source",
    [
        "print(found)",
        "owner = one_by_one = found_bytes = 1",
        "def merged_weights(): pass",
        "def wait_closed(): pass",
        "def is_locked(): pass",
        "def embed(): pass",
        "class A:\n    def closed(self, group): pass",
        "class A:\n    @property\n    def _started(self): pass",
    ],
)
def test_other_names_are_none(source: str) -> None:
    assert not list(check("core/x.py", source))


def test_a_comment_behind_a_bracket_is_named() -> None:
    source = "if f(\n    x\n):  # why\n    y = g(\n        1,\n    )  # noqa: X\n    z = [1]  # short\n"
    assert hanging_comments("a.py", source) == ["a.py:3: put the comment above its statement: ):  # why"]
