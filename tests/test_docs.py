"""README.md and the pages under launch/docs: their code runs.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import pytest
import yaml

from flexmarl.launch.cli.main import main
from flexmarl.launch.cli.registry import cli
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.simulate.scenario import read_scenario
from scripts.bench.commands import run as benchmarks

from .checkouts import changed_checkout, changed_files, changes
from .pages import PAGES, ROOT, Block, blocks, of_language, tables
from .patience import PATIENCE_S
from .warm_process import TEMPLATE

# Commands that start no actor, and that import torch for a second of work.
_LIGHT = re.compile(r"flexmarl (?:export|train [^|&;<>]*--(?:on|dry-run)\b)[^|&;<>]*")
# Commands in which a shell would only take quotation marks away.
_PLAIN = re.compile(r"""flexmarl (?:[\w\s./:=,+@%-]|'[^']*'|"[^"$`\\]*")*""")
_MAIN = "import sys; from flexmarl.launch.cli.main import main; sys.exit(main())"
# Lines that a busy machine prints too.
_WAITING = re.compile(
    r"^(?:checking .* for \d+ s, of at most \d+|(?:placing the actors|\d+ of \d+ steps) .*simulat.*)\n",
    re.MULTILINE,
)
# Settings without a file are a part of this config.
_ANY_RECIPE: dict[str, Any] = {
    "agents": {"solver": {}, "judge": {}},
    "agent_defaults": {"model": {"path": "some/model"}},
    "training": {"steps": 1},
}


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
    return [commands] if any("&" in command for command, _ in commands) else [[pair] for pair in commands]


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
    for (command, shown), lines in zip(commands, printed, strict=False):
        _check_output(block, command, shown, lines)
    assert (len(printed), done.returncode) == (len(commands), 0), f"{block}:\n{done.stdout}"


def _run_here(
    block: Block, commands: list[tuple[str, str]], folder: Path, environment: dict[str, str]
) -> None:
    """Runs commands of ``flexmarl`` in this process, and compares their output.

    A process for each would import torch and transformers, which takes ten times as long as the plan of a run. The
    first of a page has one.
    """
    for command, shown in commands:
        output = io.StringIO()
        with (
            contextlib.chdir(folder),
            patch.dict(os.environ, environment),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            status = main(shlex.split(command)[1:])
        _check_output(block, command, shown, output.getvalue())
        assert status == 0 or _is_refused(shown), f"{block}: $ {command}\nended with status {status}"


def _run_in_fork(
    block: Block, commands: list[tuple[str, str]], folder: Path, environment: dict[str, str]
) -> None:
    """Runs commands of ``flexmarl`` in processes that have imported it, and compares their output. A shell runs them if
    these processes have another environment, that of other tests."""
    for command, shown in commands:
        with tempfile.TemporaryFile("w+") as output, contextlib.chdir(folder):
            process = TEMPLATE.start(_MAIN, shlex.split(command)[1:], environment, output.fileno())
            if process is None:
                _run_in_shell(block, [(command, shown)], folder, environment)
                continue
            status = process.wait(PATIENCE_S)
            output.seek(0)
            _check_output(block, command, shown, output.read())
        assert status == 0 or _is_refused(shown), f"{block}: $ {command}\nended with status {status}"


def _check_output(block: Block, command: str, shown: str, printed: str) -> None:
    assert _is_shown(shown, printed), f"{block}: $ {command}\nprinted\n{printed}and not\n{shown}"


def _is_shown(shown: str, printed: str) -> bool:
    """``...`` stands for any text of a line; alone in a line, for any number of lines."""
    lines = (
        r"(?:.*\n)*" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r"\n"
        for line in shown.splitlines()
    )
    return re.fullmatch("".join(lines), _WAITING.sub("", printed)) is not None


@pytest.mark.parametrize("block", of_language("yaml"), ids=str)
def test_settings_are_valid(block: Block, tmp_path: Path) -> None:
    config = yaml.safe_load(block.text)
    if "cluster" in config:
        (tmp_path / "scenario.yaml").write_text(block.text)
        read_scenario(tmp_path / "scenario.yaml", [])
        return
    if Path(block.file).stem != "config":
        config.pop("recipe", None)  # of a file that names its recipe
    if not block.file:
        config = {
            **_ANY_RECIPE,
            **config,
            "training": {**_ANY_RECIPE["training"], **config.get("training", {})},
        }
        defaults = config.get("agent_defaults", {})
        config["agent_defaults"] = {**_ANY_RECIPE["agent_defaults"], **defaults}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
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
        member = command.get_command(context, name)
        assert member is not None, name
        command = member
    # With its parent: click gives a command its help option once, by the first context, and keeps it.
    command.make_context(command.name, arguments, parent=context)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\n", "a\n", True),
        ("a\n", "a\nb\n", False),
        ("", "a\n", False),
        ("a ... c\n", "a b c\n", True),
        ("a ... c\n", "a b\nc\n", False),
        ("a\n...\nc\n", "a\nc\n", True),
        ("a\n...\nc\n", "a\nb\nb\nc\n", True),
        ("a\n...\nc\n", "a\nb\n", False),
        ("a\n", "3 of 3 steps simulated, 2 min 20 s of virtual time; 30 s\na\n", True),
        ("a\n", "checking rewards for 10 s, of at most 60\na\n", True),
    ],
)
def test_output_is_compared(shown: str, printed: str, same: bool) -> None:
    assert _is_shown(shown, printed) is same


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


# --------------------------------------------------------------------------- files that the runs of a page have written


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
