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
import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from flexmarl.launch.cli.registry import cli
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.simulate.scenario import read_scenario
from scripts.bench.commands import run as benchmarks

from .checkouts import changed_checkout, changed_files, changes
from .pages import PAGES, ROOT, Block, blocks, of_language, tables
from .patience import PATIENCE_S
from .warm_process import TEMPLATE, Template
from .warm_programs import warm_programs

# Lines that a busy machine prints too.
_WAITING = re.compile(
    r"^(?:checking .* for \d+ s, of at most \d+|(?:placing the actors|\d+ of \d+ steps) .*simulat.*)\n"
    r"|^warning: nothing has ended for .*\n(?:  .*\n)+",
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
    folder, programs = tmp_path / "page", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    package = changed_checkout(PAGES[page], tmp_path / "package") if changed_files(PAGES[page]) else ROOT
    with contextlib.ExitStack() as stack:
        template = TEMPLATE if package == ROOT else stack.enter_context(contextlib.closing(Template()))
        stack.enter_context(warm_programs(programs, template, _new_names(page)))
        environment = _environment(programs, package)
        for block in blocks(page):
            if block.file and not block.is_of_package:
                (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.file).write_text(block.text)
            elif block.language == "console":
                for commands in _parts(block):
                    _run_in_shell(block, commands, folder, environment)
    _check_metrics(page, folder)
    _check_ratios(page, folder)
    _check_learning(page, folder)


def _new_names(page: str) -> set[str]:
    """The commands that no page before this one has. The first of a name starts a new interpreter, as a person does;
    the processes of all others are forked, which saves the imports of torch and of transformers."""
    pages = list(PAGES)
    before = {name for other in pages[: pages.index(page)] for name in _names(other)}
    return _names(page) - before


def _names(page: str) -> set[str]:
    """The names of the commands of ``flexmarl`` that a page runs (``train``), and ``python``."""
    text = "\n".join(block.text for block in blocks(page) if block.language == "console")
    return set(re.findall(r"\b(?:flexmarl |(?=python ))([\w-]+)", text))


def _environment(programs: Path, package: Path) -> dict[str, str]:
    """With ``package``, and with the commands ``flexmarl`` and ``python`` on the path, as in an active environment."""
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
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
        (
            "a\n",
            "warning: nothing has ended for 30.2 s, step 1 waits for:\n  supervisor: a process for router\na\n",
            True,
        ),
    ],
)
def test_output_is_compared(shown: str, printed: str, same: bool) -> None:
    assert _is_shown(shown, printed) is same


def test_the_first_command_of_each_name_has_a_new_interpreter() -> None:
    names = {page: _new_names(page) for page in PAGES}
    assert "train" in names["README.md"] and "new" in names["custom-losses.md"]
    assert "python" in names["algorithms.md"]
    firsts = [name for page in PAGES for name in names[page]]
    assert len(firsts) == len(set(firsts)) > 12


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
