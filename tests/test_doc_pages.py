"""README.md and the pages under launch/docs: links lead somewhere, tables are complete, the README is short."""

import json
import re
from pathlib import Path

import pytest
import yaml
from pydantic.fields import FieldInfo

from flexmarl.actors.credit.algorithms import ALGORITHMS
from flexmarl.actors.messages import InstanceApi
from flexmarl.core.errors import CallTimeout
from flexmarl.core.signature import endpoint_options
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.config.written_config import Defaults

from .pages import PAGES, ROOT, tables
from .setting_keys import settings

README_LINES = 200
_LINK = re.compile(r"\[[^\]]+\]\(([^)]+)\)")
_PATH = re.compile(r"`((?:core|transport|actors|launch|scripts|tests)/[\w./-]*)`")


# --------------------------------------------------------------------------- links and lengths


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in _LINK.findall(PAGES[page].read_text()):
        if not link.startswith("https://"):
            name, _, anchor = link.partition("#")
            target = (PAGES[page].parent / name).resolve() if name else PAGES[page]
            assert target.exists(), link
            assert not anchor or anchor in _anchors(target), link


def _anchors(page: Path) -> set[str]:
    """GitHub's: lower case, without punctuation, hyphens for blanks."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    assert [path for path in _PATH.findall(PAGES[page].read_text()) if not (ROOT / path).exists()] == []


def test_every_page_can_be_reached() -> None:
    for page, path in PAGES.items():
        links = {link.partition("#")[0] for link in _LINK.findall(path.read_text())}
        if page == "README.md":
            assert {f"launch/docs/{other}" for other in PAGES if other != page} <= links
        else:
            assert "../../README.md" in links
            assert any(other in links for other in PAGES if other != page), "links to no other page"


def test_the_contents_have_each_page_once_in_one_of_four_groups() -> None:
    groups: dict[str, list[str]] = {}
    for heading, (group, *cells) in tables("README.md"):
        if heading == "Where to read on" and group != "to":
            if group:
                pages = groups.setdefault(group.strip("*"), [])
            pages += re.findall(r"\(launch/docs/([\w-]+\.md)\)", " ".join(cells))
    assert list(groups) == ["start", "write a workflow", "run it", "extend it"]
    listed = [page for pages in groups.values() for page in pages]
    assert sorted(listed) == sorted(set(PAGES) - {"README.md"})


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].read_text().splitlines()) <= README_LINES


# --------------------------------------------------------------------------- tables that are complete


def test_the_settings_page_has_every_setting_and_its_default() -> None:
    written = {}
    for heading, (key, default, *_) in tables("settings.md"):
        section = re.match(r"`([\w.<>]+)`", heading)
        if key != "key":
            [name] = re.findall(r"^`([\w.]+)`$", key)
            written[f"{section[1]}.{name}" if section else name] = default
    existing = dict(settings(RunConfig)) | dict(settings(Defaults))
    assert sorted(written.keys() - existing.keys()) == []
    assert sorted(existing.keys() - written.keys()) == []
    assert {key: text for key, text in written.items() if not _is_default(text, existing[key])} == {}


def _is_default(text: str, field: FieldInfo) -> bool:
    """True if the first code in a table's cell is the field's default."""
    if field.is_required():
        return text.startswith("required")
    default = field.get_default(call_default_factory=True, validated_data={})
    code = re.match(r"`([^`]*)`", text)
    if code is None:
        return False
    value = yaml.safe_load(code[1])
    if isinstance(default, float) and isinstance(value, str | int):
        value = float(value)  # YAML wants a point in 1e-6
    return bool(value == json.loads(json.dumps(default)))


def test_the_algorithms_page_has_every_algorithm_and_its_numbers() -> None:
    rows = [cells for heading, cells in tables("algorithms.md") if heading == "Numbers"]
    header, *written = rows
    fields = [name.strip("`") for name in header[1:]]
    assert len(fields) >= 7
    assert {name.strip("`") for name, *_ in written} == ALGORITHMS.keys()
    for name, *values in written:
        row = ALGORITHMS[name.strip("`")]
        shown = {field: yaml.safe_load(value.strip("`")) for field, value in zip(fields, values, strict=True)}
        assert shown == {field: getattr(row, field) for field in fields} | {
            "estimator": row.estimator.__name__
        }


def test_the_algorithms_page_has_the_formula_and_the_source_of_each_algorithm() -> None:
    page = PAGES["algorithms.md"].read_text()
    parts = dict(re.findall(r"^### Formula of (\w+)\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL))
    assert parts.keys() == ALGORITHMS.keys()
    for name, row in ALGORITHMS.items():
        numbers = re.findall(r"arXiv (\d{4}\.\d{5})", row.paper)
        named = [row.estimator.__name__, row.surrogate, row.aggregation]
        assert not [word for word in [*named, *numbers] if word not in parts[name]], name
        for place in re.findall(r"(?:eq\.|section) [\d.]+(?: and [\d.]+| to [\d.]+)?", row.paper):
            assert place in parts[name], f"{name}: {place}"


def test_the_functions_of_the_formulas_are_in_the_files_beside_them() -> None:
    file = ""
    for _, cells in (row for row in tables("algorithms.md") if row[0] == "Formulas"):
        file = next(iter(re.findall(r"`([\w/]+\.py)`", cells[3])), file)
        source = (ROOT / file).read_text() if file else ""
        for name in re.findall(r"`(\w+)`", cells[3]):
            assert re.search(rf"^(?:def|class) {name}\b", source, re.MULTILINE), name
        for number in re.findall(r"\[(\d{4}\.\d{5})\]", cells[4]):
            assert number in source, f"{file} does not name {number}"


def test_each_trainer_that_is_compared_has_a_commit_a_date_and_a_row_in_every_table() -> None:
    read: dict[str, list[str]] = {}
    compared: dict[str, list[str]] = {}
    for heading, (trainer, *cells) in tables("comparison.md"):
        if trainer != "trainer" and heading == "Other trainers":
            read[trainer] = cells
        elif trainer != "trainer":
            compared.setdefault(heading, []).append(trainer)
    for repository, commit, date in read.values():
        assert re.fullmatch(r"[\w-]+/[\w-]+", repository) and re.fullmatch(r"`[0-9a-f]{40}`", commit)
        assert re.fullmatch(r"2026-\d\d-\d\d", date)
    assert len(compared) == 3
    for trainers in compared.values():
        assert trainers == ["flexmarl", *read]


def test_the_workflows_page_names_the_errors_of_generate() -> None:
    options = endpoint_options(InstanceApi.generate)
    assert options is not None
    # The rollout actor asks for versions that are served; the loss of an instance fails no turn.
    seen = {CallTimeout.__name__, *(error.__name__ for error in options.raises)} - {
        "WrongVersion",
        "WrongPolicy",
        "EngineFailed",
    }
    page = PAGES["workflows.md"].read_text()
    paragraph = page[page.index("- `generate` raises") :].split("\n- ")[0].split("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", paragraph)) - {"generate", "turn_timeout_s", "max_new_tokens"}
    assert named == seen
