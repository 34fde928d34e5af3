"""The reference of the public names: each is described, and a docstring becomes markdown."""

import importlib
import re

import pytest

from scripts.api_pages import (
    DOORS,
    ERRORS,
    anchors,
    api_pages,
    markdown_of,
    members_of,
    names_without_text,
    page_of,
    with_api_links,
)


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return api_pages()


@pytest.mark.parametrize("door", DOORS)
def test_each_public_name_has_a_part_with_a_signature_and_a_place(door: str, pages: dict[str, str]) -> None:
    page = pages[page_of(door)]
    parts = dict(re.findall(r"^## (\w+) \{#\1\}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert sorted(parts) == sorted(importlib.import_module(door).__all__)
    for name, text in parts.items():
        assert "Source: `" in text or f"The same as [`flexmarl.actors.{name}`]" in text, name


def test_errors_that_no_door_has_are_described_once(pages: dict[str, str]) -> None:
    for module in ERRORS:
        names = re.findall(r"^## (\w+) ", pages[page_of(module)], re.MULTILINE)
        assert names and all(anchors()[name] == f"{page_of(module)}#{name}" for name in names)
    assert "## PromptTooLong {" in pages["api/actors-errors.md"]
    assert "## LimitReached {" not in pages["api/actors-errors.md"], "it is in flexmarl.actors"
    assert "[PromptTooLong](actors-errors.md#PromptTooLong)" in pages["api/actors.md"]


def test_each_public_name_and_each_member_has_a_docstring() -> None:
    assert names_without_text() == []


def test_members_are_those_of_a_class_and_of_its_private_bases() -> None:
    from flexmarl.actors import GymnasiumEnvironment
    from flexmarl.core import ActorSystem
    from flexmarl.testing import VirtualTimeLoop

    spawn = next(member for member in members_of(ActorSystem) if member.name == "spawn")
    assert len(spawn.definitions) > 1, "its overloads"
    loop = {member.name for member in members_of(VirtualTimeLoop)}
    assert "call_at" in loop and "sock_recv" not in loop, "refused, without a docstring"
    steps = next(member for member in members_of(GymnasiumEnvironment) if member.name == "step")
    assert steps.text, "of the class it derives from"


def test_a_signature_is_the_text_of_the_source_on_lines_that_can_be_read(pages: dict[str, str]) -> None:
    core = pages["api/core.md"]
    assert "\n    settings: Settings = DEFAULT_SETTINGS,\n" in core
    assert max(map(len, re.findall(r"^    \w+: .*,$", core, re.MULTILINE))) < 120
    assert "```python\nasync def on_start() -> None\n" in core and "```python\n@dataclass(frozen=True" in core


@pytest.mark.parametrize(
    ("docstring", "markdown"),
    [
        ("Of ``a*b`` and __c__, x*y*z, <d>.", r"Of ``a*b`` and \_\_c\_\_, x\*y\*z, \<d>."),
        ("Text:\n- a\n- b\n  more", "Text:\n\n- a\n- b\n  more"),
        ("Text:\n\n    a = b*c\n\n    d()\n\nEnd.", "Text:\n\n```python\na = b*c\n\nd()\n```\n\nEnd."),
    ],
)
def test_a_docstring_becomes_markdown(docstring: str, markdown: str) -> None:
    assert markdown_of(docstring) == markdown


@pytest.mark.parametrize(
    ("text", "linked"),
    [
        ("a `Tcp` and a `Tcp`", "a [`Tcp`](api/core.md#Tcp) and a `Tcp`"),
        ("`Keys.for_client`", "[`Keys.for_client`](api/core.md#Keys.for_client)"),
        ("`run` a `flexmarl`, Raises CallTimeout", "`run` a `flexmarl`, Raises CallTimeout"),
        ("# `Tcp`\n[`Tcp`](x.md)\n```\n`Tcp`\n```", "# `Tcp`\n[`Tcp`](x.md)\n```\n`Tcp`\n```"),
    ],
)  # fmt: skip
def test_the_first_mention_of_a_name_becomes_a_link(text: str, linked: str) -> None:
    assert with_api_links(text, "runtime.md") == linked


def test_links_of_the_reference_and_of_a_page_in_a_folder() -> None:
    assert with_api_links("`Tcp`", "recipes/a.md") == "[`Tcp`](../api/core.md#Tcp)"
    assert with_api_links("Raises CallTimeout.", "api/actors.md", every=True) == (
        "Raises [CallTimeout](core.md#CallTimeout)."
    )
    assert anchors()["flexmarl.QuerySource"] == "api/actors.md#QuerySource"
