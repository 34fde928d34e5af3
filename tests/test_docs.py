"""README.md and the pages under launch/docs: their code runs, their links lead somewhere, their tables are complete.

A page's code blocks are taken in order, in a folder of the page's own. By the language behind the fence:

- ``python``: a file; the first line names it (``# my-recipe/workflow.py``);
- ``yaml``: a file likewise; without a name, settings, which are resolved as a part of some recipe's config;
- ``console``: lines behind ``$ `` are run, and print the lines that follow them; ``...`` stands for any text or lines;
- ``sh``: commands that take too long for a test. Files, options and settings in them must exist;
- ``diff``: a change of the package. The page runs in a copy of the package with this change, and with the page's
  files that are in a folder of the package (``# actors/inference/engines/plain_engine.py``);
- ``text``: anything else, unchecked.
"""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin
from unittest.mock import patch

import click
import pytest
import yaml
from pydantic.fields import FieldInfo

from flexmarl.actors.config_base import Config
from flexmarl.actors.credit.algorithms import ALGORITHMS
from flexmarl.actors.filters.filter_config import FilterConfig
from flexmarl.actors.messages import InstanceApi
from flexmarl.core.errors import CallTimeout
from flexmarl.core.signature import endpoint_options
from flexmarl.launch.cli.main import main
from flexmarl.launch.cli.registry import cli
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.config.written_config import Defaults
from flexmarl.launch.monitoring.sinks.sink_config import SinkConfig
from flexmarl.launch.simulate.scenario import read_scenario
from scripts.bench.commands import run as benchmarks

from .checkouts import PACKAGE, changed_checkout, changed_files, changes
from .patience import PATIENCE_S
from .warm_process import TEMPLATE

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "launch" / "docs"
PAGES = {path.name: path for path in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]}
README_LINES = 200

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# ([\w./-]+\.(?:py|yaml))\n")
_LINK = re.compile(r"\[[^\]]+\]\(([^)]+)\)")
# Commands that start no actor, and that import torch for a second of work.
_LIGHT = re.compile(r"flexmarl (?:export|train [^|&;<>]*--(?:on|dry-run)\b)[^|&;<>]*")
# Commands in which a shell would only take quotation marks away.
_PLAIN = re.compile(r"""flexmarl (?:[\w\s./:=,+@%-]|'[^']*'|"[^"$`\\]*")*""")
_MAIN = "import sys; from flexmarl.launch.cli.main import main; sys.exit(main())"
# Lines that a busy machine prints too.
_WAITING = re.compile(r"^checking .* for \d+ s, of at most \d+\n", re.MULTILINE)
_PATH = re.compile(r"`((?:core|transport|actors|launch|scripts|tests)/[\w./-]*)`")
# Settings without a file are a part of this config.
_ANY_RECIPE: dict[str, Any] = {
    "agents": {"solver": {}, "judge": {}},
    "agent_defaults": {"model": {"path": "some/model"}},
    "training": {"steps": 1},
}


@dataclass(frozen=True)
class Block:
    """A code block. ``file``: its name, empty if it has none."""

    page: str
    line: int
    language: str
    text: str

    @property
    def file(self) -> str:
        named = _FILE.match(self.text) if self.language in ("python", "yaml") else None
        return named[1] if named else ""

    @property
    def is_of_package(self) -> bool:
        """The page adds the file to the package."""
        return self.file.partition("/")[0] in PACKAGE

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> Iterator[Block]:
    text = PAGES[page].read_text()
    for found in _BLOCK.finditer(text):
        yield Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])


def of_language(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


# --------------------------------------------------------------------------- code that runs


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(b.language == "console" for b in blocks(page))]
)
def test_a_page_runs(page: str, tmp_path: Path) -> None:
    folder = tmp_path / "page"
    package = changed_checkout(PAGES[page], tmp_path / "package") if changed_files(PAGES[page]) else ROOT
    environment = _environment(tmp_path, package)
    folder.mkdir()
    typed: set[str] = set()
    for block in blocks(page):
        if block.file and not block.is_of_package:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text)
        elif block.language == "console":
            for commands in _parts(block):
                _runner(commands, package, typed)(block, commands, folder, environment)
                typed |= _names(commands)
    _check_metrics(page, folder)
    _check_ratios(page, folder)
    _check_learning(page, folder)


def _runner(
    commands: list[tuple[str, str]], package: Path, typed: set[str]
) -> Callable[[Block, list[tuple[str, str]], Path, dict[str, str]], None]:
    """``typed``: the commands that a page has had. The first of a name is typed in a shell, by the first pass; further
    ones save the start of an interpreter, if a shell has nothing else to do. In the second pass, with another Python,
    other tests start interpreters of that Python, and pages save that of each first command too."""
    if package != ROOT:
        return _run_in_shell
    again = _names(commands) <= typed
    if again and all(_LIGHT.fullmatch(command) for command, _ in commands):
        return _run_here
    plain = all(_PLAIN.fullmatch(command) for command, _ in commands)
    second = os.environ.get("FLEXMARL_SECOND_PASS") == "1"
    return _run_in_fork if plain and (again or second) else _run_in_shell


def _names(commands: list[tuple[str, str]]) -> set[str]:
    """The names of the commands of ``flexmarl`` in these lines: ``train``."""
    return {name for line, _ in commands for name in re.findall(r"\bflexmarl (\w+)", line)}


def _environment(tmp_path: Path, package: Path) -> dict[str, str]:
    """With ``package``, and with the commands ``flexmarl`` and ``python`` on the path, as in an active environment."""
    programs = {
        "python": "",
        "flexmarl": f"-c {shlex.quote(_MAIN)}",
    }
    (tmp_path / "bin").mkdir()
    for name, arguments in programs.items():
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        program.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(package / "scripts" / "src"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "120",
    }


def _commands(block: Block) -> list[tuple[str, str]]:
    """Each command with the output that the page shows."""
    return re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE)


def _parts(block: Block) -> list[list[tuple[str, str]]]:
    """The commands of one shell: all of a block if one runs behind the others, else each by itself."""
    commands = _commands(block)
    return [commands] if any("&" in command for command, _ in commands) else [[one] for one in commands]


def _is_refused(output: str) -> bool:
    return output.startswith("flexmarl: ")


def _run_in_shell(
    block: Block, commands: list[tuple[str, str]], folder: Path, environment: dict[str, str]
) -> None:
    """Runs the commands in one shell, which ends with the first that fails, and compares their output.

    A command may fail if the page shows a refusal.
    """
    script = "".join(
        f"echo; echo '>>> {number}'\n{command}{' || true' if _is_refused(output) else ''}\n"
        for number, (command, output) in enumerate(commands)
    )
    done = subprocess.run(
        ["bash", "-c", f"set -e; exec 2>&1\n{script}wait"],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    printed = re.split(r"\n>>> \d+\n", done.stdout)[1:]
    for (command, wanted), got in zip(commands, printed, strict=False):
        _check_output(block, command, wanted, got)
    assert (len(printed), done.returncode) == (len(commands), 0), f"{block}:\n{done.stdout}"


def _run_here(
    block: Block, commands: list[tuple[str, str]], folder: Path, environment: dict[str, str]
) -> None:
    """Runs commands of ``flexmarl`` in this process, and compares their output.

    A process for each would import torch and transformers, which takes ten times as long as the plan of a run. The
    first of a page has one.
    """
    for command, wanted in commands:
        output = io.StringIO()
        with (
            contextlib.chdir(folder),
            patch.dict(os.environ, environment),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            status = main(shlex.split(command)[1:])
        _check_output(block, command, wanted, output.getvalue())
        assert status == 0 or _is_refused(wanted), f"{block}: $ {command}\nended with status {status}"


def _run_in_fork(
    block: Block, commands: list[tuple[str, str]], folder: Path, environment: dict[str, str]
) -> None:
    """Runs commands of ``flexmarl`` in processes that have imported it, and compares their output. A shell runs them if
    these processes have another environment, that of other tests."""
    for command, wanted in commands:
        with tempfile.TemporaryFile("w+") as output, contextlib.chdir(folder):
            process = TEMPLATE.start(_MAIN, shlex.split(command)[1:], environment, output.fileno())
            if process is None:
                _run_in_shell(block, [(command, wanted)], folder, environment)
                continue
            status = process.wait(PATIENCE_S)
            output.seek(0)
            _check_output(block, command, wanted, output.read())
        assert status == 0 or _is_refused(wanted), f"{block}: $ {command}\nended with status {status}"


def _check_output(block: Block, command: str, wanted: str, printed: str) -> None:
    assert _matches(wanted, _WAITING.sub("", printed)), (
        f"{block}: $ {command}\nprinted\n{printed}and not\n{wanted}"
    )


def _matches(wanted: str, got: str) -> bool:
    """``...`` stands for any text of a line; alone in a line, for any number of lines."""
    lines = (
        r"(?:.*\n)*" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r"\n"
        for line in wanted.splitlines()
    )
    return re.fullmatch("".join(lines), got) is not None


@pytest.mark.parametrize("block", of_language("yaml"), ids=str)
def test_settings_are_valid(block: Block, tmp_path: Path) -> None:
    given = yaml.safe_load(block.text)
    if "cluster" in given:
        (tmp_path / "scenario.yaml").write_text(block.text)
        read_scenario(tmp_path / "scenario.yaml", [])
        return
    if Path(block.file).stem != "config":
        given.pop("recipe", None)  # of a file that names its recipe
    if not block.file:
        given = {**_ANY_RECIPE, **given, "training": {**_ANY_RECIPE["training"], **given.get("training", {})}}
        defaults = given.get("agent_defaults", {})
        given["agent_defaults"] = {**_ANY_RECIPE["agent_defaults"], **defaults}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(given))
    (tmp_path / "workflow.py").touch()
    resolve(str(tmp_path), [])


@pytest.mark.parametrize("block", of_language("sh"), ids=str)
def test_commands_exist(block: Block) -> None:
    for line in block.text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            _check_command(words)


def _check_command(words: list[str]) -> None:
    match words:
        case ["flexmarl", *arguments] | [".venv/bin/flexmarl", *arguments]:
            _parse_options(cli, arguments)
            if arguments[0] == "train":
                settings = [word for word in arguments if "=" in word and not word.startswith("-")]
                resolve("sort-digits", settings)
        case ["python", "-m", module, *arguments]:
            script = f"{module.removeprefix('flexmarl.').replace('.', '/')}.py"
            _check_command(["python", script, *arguments])
        case ["python" | ".venv/bin/python", script, *arguments]:
            source = (ROOT / script).read_text()
            assert not [word for word in arguments if word.startswith("-") and f'"{word}"' not in source]
        case ["pip", "install", package]:
            [extra] = re.findall(r"^flexmarl\[(\w+)\]$", package)
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert extra in project["optional-dependencies"]
        case ["source", ".venv/bin/activate"]:
            pass
        case ["scripts/bench/run", *arguments]:
            _parse_options(benchmarks, arguments)
        case [script, *_] if script.startswith("scripts/"):
            assert os.access(ROOT / script, os.X_OK), script
        case _:
            pytest.fail(f"no rule to check {words}")


def _parse_options(command: click.Command, arguments: list[str]) -> None:
    context = click.Context(command, **command.context_settings)
    while isinstance(command, click.Group):
        name, *arguments = arguments
        found = command.get_command(context, name)
        assert found is not None, name
        command = found
    # With its parent: click gives a command its help option once, by the first context, and keeps it.
    command.make_context(command.name, arguments, parent=context)


@pytest.mark.parametrize(
    ("wanted", "got", "same"),
    [
        ("a\n", "a\n", True),
        ("a\n", "a\nb\n", False),
        ("", "a\n", False),
        ("a ... c\n", "a b c\n", True),
        ("a ... c\n", "a b\nc\n", False),
        ("a\n...\nc\n", "a\nc\n", True),
        ("a\n...\nc\n", "a\nb\nb\nc\n", True),
        ("a\n...\nc\n", "a\nb\n", False),
    ],
)
def test_output_is_compared(wanted: str, got: str, same: bool) -> None:
    assert _matches(wanted, got) is same


@pytest.mark.parametrize(
    ("command", "in_a_fork"),
    [
        ("flexmarl train my-recipe training.steps=2 --name trial", True),
        ("flexmarl train sinks='[{name: csv, file: \"more.csv\"}]' --quiet", True),
        ('flexmarl plan scenario.yaml --budget "8 devices"', True),
        ("flexmarl train a.yaml > log &", False),
        ("flexmarl train {a,b}.yaml", False),
        ('flexmarl train "$recipe"', False),
        ("flexmarl samples runs/*", False),
        ("flexmarl stop runs/a; flexmarl runs list", False),
        ("python recipe.py", False),
    ],
)
def test_a_command_of_a_name_that_was_typed_runs_in_a_fork_if_it_needs_no_shell(
    command: str, in_a_fork: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLEXMARL_SECOND_PASS", raising=False)
    commands, typed = [(command, "")], _names([(command, "")])
    assert _runner(commands, ROOT, {"new"}) is _run_in_shell
    assert _runner(commands, ROOT, typed) is (_run_in_fork if in_a_fork else _run_in_shell)
    assert _runner(commands, ROOT / "copy", typed) is _run_in_shell, "of another package"
    monkeypatch.setenv("FLEXMARL_SECOND_PASS", "1")
    assert _runner(commands, ROOT, set()) is (_run_in_fork if in_a_fork else _run_in_shell)


def test_light_commands_of_a_name_that_was_typed_run_in_the_process_of_the_tests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FLEXMARL_SECOND_PASS", raising=False)
    commands = [("flexmarl train my-recipe --dry-run", "")]
    assert _runner(commands, ROOT, {"new"}) is _run_in_shell
    assert _runner(commands, ROOT, {"new", "train"}) is _run_here
    assert _runner(commands, ROOT / "copy", {"train"}) is _run_in_shell


def test_every_block_is_of_a_known_kind() -> None:
    for block in (block for page in PAGES for block in blocks(page)):
        assert block.language in ("python", "yaml", "console", "sh", "text", "diff"), block
        assert block.language != "python" or block.file, f"{block}: the first line names no file"


@pytest.mark.parametrize("page", PAGES)
def test_every_file_of_a_page_is_used(page: str) -> None:
    """A file in a page is run, imported or passed to a command: its name or its folder's is in a console block. A file
    that the page adds to the package is named in the page's change of another file."""
    commands = "\n".join(block.text for block in blocks(page) if block.language == "console")
    for block in blocks(page):
        if block.file:
            folder, _, name = block.file.rpartition("/")
            module = name.removesuffix(".py")
            word, text = (
                (module, "".join(changes(PAGES[page])))
                if block.is_of_package
                else (folder or module, commands)
            )
            assert re.search(rf"\b{re.escape(word)}\b", text), block


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


def tables(page: str) -> Iterator[tuple[str, list[str]]]:
    """The rows of a page's tables, each with the heading that it is under."""
    heading = ""
    for line in PAGES[page].read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|") and not re.match(r"\|[-|: ]+\|$", line):
            yield heading, [cell.strip() for cell in line.strip("|").split(" | ")]


def settings(model: type[Config], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of a section and of the sections in it, with dots; names that a user chooses as ``<agent>``."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        kind = field.annotation
        kinds = [kind, *get_args(kind)]
        if NoneType in kinds:  # a choice of sections that may be left out
            kinds += [
                choice for one in kinds if get_origin(one) is Annotated for choice in get_args(one.__origin__)
            ]
        if get_origin(kind) is dict:
            kinds = [one.__origin__ if get_origin(one) is Annotated else one for one in kinds]
        if field.annotation in (tuple[SinkConfig, ...], tuple[FilterConfig, ...]):
            # a list of sections that are chosen by name
            yield key, field
            entry = get_args(field.annotation)[0]
            for chosen in (get_args(one)[0] for one in get_args(get_args(entry)[0])):
                yield from settings(chosen, f"{key}.{chosen.model_fields['name'].default}.")
            continue
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Config)]
        if choices := [
            one.__origin__
            for one in kinds
            if get_origin(one) is Annotated
            and isinstance(one.__origin__, type)
            and issubclass(one.__origin__, Config)
        ]:
            # chosen by name; the first is the default, and the others have some of its keys
            for number, chosen in enumerate(choices):
                known = {found for one in choices[:number] for found, _ in settings(one, f"{key}.")}
                yield from (found for found in settings(chosen, f"{key}.") if found[0] not in known)
        elif not sections:
            yield key, field
        elif get_origin(kind) is dict:
            yield from settings(sections[0], f"{key}.<{_singular(name)}>.")
        else:
            yield from settings(sections[0], f"{key}.")


def _singular(name: str) -> str:
    return {"policies": "policy"}.get(name, name.removesuffix("s"))


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
    found = re.match(r"`([^`]*)`", text)
    if found is None:
        return False
    value = yaml.safe_load(found[1])
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


def _check_metrics(page: str, folder: Path) -> None:
    """The metrics page explains every key that the runs of the operating page have written."""
    if page != "operating.md":
        return
    explained = {key for _, cells in tables("metrics.md") for key in re.findall(r"`([\w./<>]+)`", cells[0])}
    for name in ("metrics.jsonl", "events.jsonl"):
        for file in folder.glob(f"runs/*/{name}"):
            for line in map(json.loads, file.read_text().splitlines()):
                keys = {line["event"]} if "event" in line else set(line)
                assert not {key for key in keys if not _explained(key, explained)}
    assert list(folder.glob("runs/*/metrics.jsonl"))


def _check_ratios(page: str, folder: Path) -> None:
    """The added engine samples with the trainer's weights, and reports the probabilities that it has sampled with."""
    if page != "add-an-engine.md":
        return
    [metrics] = folder.glob("runs/*/metrics.jsonl")
    ratios = [json.loads(line)["ratio_deviation/sorter"] for line in metrics.read_text().splitlines()]
    assert len(ratios) == 2 and 0.0 < max(ratios) < 1e-4, "0: nothing was trained"


def _check_learning(page: str, folder: Path) -> None:
    """The tutorial's agents learn their task, far above the tenth of a guess, and a model of theirs is exported."""
    if page != "tutorial.md":
        return
    lines = map(json.loads, (folder / "runs" / "first" / "metrics.jsonl").read_text().splitlines())
    last = [line for line in lines if "eval/accuracy" in line][-1]
    for figure in ("accuracy", "reward/left", "reward/right", "reward/final"):
        assert last[f"eval/{figure}"] > 0.6, figure
    assert (folder / "models" / "final" / "model.safetensors").exists()


def _explained(key: str, explained: set[str]) -> bool:
    return any(re.fullmatch(re.sub(r"<\w+>", "[^/]+", re.escape(other)), key) for other in explained)


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
