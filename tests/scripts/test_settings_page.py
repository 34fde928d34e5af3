"""The settings page has what the schema gives."""

from collections import Counter
from typing import Annotated, Literal

import pytest
from pydantic import Field

from flexmarl.actors.config_base import Config, Count, Natural, Seconds, Share, Unit
from scripts import settings_page


class Example(Config):
    steps: Annotated[Count, Unit("steps")]
    """Steps that
    are made."""
    limit_bytes: Annotated[Natural, Unit("bytes")] | None = 3 * 2**20
    """Size: see [Sizes](sizes.md)."""
    share: Share = 0.5
    """Share."""
    wait_s: Seconds | None = None
    """Wait."""
    rate: Annotated[float, Field(gt=0, lt=2**63)] = 1e-6
    """Rate."""
    kind: Literal["fast", "slow"] = "fast"
    """Kind."""
    names: tuple[str, ...] = ("a", "b")
    """Names."""
    silent: bool = False


EXAMPLE = {setting.name: setting for setting in settings_page.all_settings(Example)}


def test_the_committed_page_is_what_the_schema_gives() -> None:
    page = settings_page.PAGE.read_text()
    assert page == settings_page.rendered(page), "run python scripts/settings_page.py"


def test_the_page_has_each_setting_once_with_a_text() -> None:
    keys = Counter(settings_page.keys_of(settings_page.PAGE.read_text()))
    settings = {setting.key: setting for setting in settings_page.all_settings()}
    assert keys == Counter(settings.keys())
    assert all(settings_page.text_of(setting) for setting in settings.values())


@pytest.mark.parametrize(
    ("name", "default", "unit", "values"),
    [
        ("steps", "required", "steps", "integer ≥ 1"),
        ("limit_bytes", "`3145728` (3 MiB)", "bytes", "integer ≥ 0, `null`"),
        ("share", "`0.5`", "", "number ≥ 0, ≤ 1"),
        ("wait_s", "`null`", "s", "number > 0, `null`"),
        ("rate", "`1.0e-6`", "", "number > 0, < 2^63"),
        ("kind", "`fast`", "", "`fast`, `slow`"),
        ("names", "`[a, b]`", "", "list"),
        ("silent", "`false`", "", "`true`, `false`"),
    ],
)
def test_a_row_has_the_default_the_unit_and_the_values_of_its_field(
    name: str, default: str, unit: str, values: str
) -> None:
    setting = EXAMPLE[name]
    cells = (
        settings_page.default_of(setting),
        settings_page.unit_of(setting),
        settings_page.values_of(setting),
    )
    assert cells == (default, unit, values)


def test_the_text_of_a_field_stands_under_it() -> None:
    assert settings_page.text_of(EXAMPLE["steps"]) == "Steps that are made."
    with pytest.raises(KeyError, match="silent"):
        settings_page.text_of(EXAMPLE["silent"])


def test_tables_are_of_sections_choices_or_whole_keys_and_other_text_is_left_alone() -> None:
    page = (
        "before\n<!-- section: pool name=shared -->\nold\n<!-- end -->\n"
        "<!-- settings: weights seed -->\n<!-- end -->\nafter\n"
    )
    text = settings_page.rendered(page)
    assert text.startswith("before\n") and text.endswith("<!-- end -->\nafter\n") and "\nold\n" not in text
    assert "| `slots` | required | slots | integer ≥ 1, `auto` |" in text and "`name`" not in text
    assert "| `weights.path` | `auto` |" in text and "| `seed` | `0` |" in text
    names = settings_page.rendered("<!-- section: pool -->\n<!-- end -->")
    assert "| `name` | `static` |  | `static`, `shared` |" in names


@pytest.mark.parametrize("place", ["section: tea", "section: pool name=tea", "settings: seed tea.pot"])
def test_an_unknown_place_is_an_error(place: str) -> None:
    with pytest.raises(KeyError, match="tea"):
        settings_page.rendered(f"<!-- {place} -->\n<!-- end -->")
