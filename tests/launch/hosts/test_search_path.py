"""Nothing is imported from the working directory, but the recipe that is named."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from flexmarl.launch.hosts import search_path

from ..conftest import SIMULATED, SOURCES, TINY

SHADOWS = ("click", "msgpack", "numpy", "psutil", "pydantic", "rich", "structlog", "uvloop", "yaml", "zmq")
COMMAND = "import sys; from flexmarl.launch.cli.main import main; sys.exit(main())"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with files that have names of libraries, and of the module beside the recipe's workflow."""
    recipe, here = tmp_path / "recipe", tmp_path / "here"
    shutil.copytree(TINY, recipe)
    workflow = recipe / "workflow.py"
    workflow.write_text(f"import beside\nassert beside.WHERE == 'recipe'\n{workflow.read_text()}")
    (recipe / "beside.py").write_text("WHERE = 'recipe'\n")
    here.mkdir()
    for name in (*SHADOWS, "beside"):
        (here / f"{name}.py").write_text(
            f"import pathlib\npathlib.Path({str(tmp_path / 'executed')!r}).open('a').write('{name} ')\n"
            "raise ImportError('a file of the working directory')\n"
        )
    return here


def run(folder: Path, how: Sequence[str], paths: str, *options: str) -> None:
    ended = subprocess.run(
        [sys.executable, *how, "train", str(folder.parent / "recipe"), "--name", "run", *SIMULATED, *options],
        cwd=folder, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    executed = folder.parent / "executed"
    assert not executed.exists(), f"executed: {executed.read_text()}"
    assert ended.returncode == 0, ended.stderr


def test_a_run_executes_no_file_of_the_working_directory(folder: Path) -> None:
    run(folder, ["-c", COMMAND], f"{os.pathsep}{SOURCES}", "training.steps=1")
    assert (folder / "runs" / "run" / "report.html").exists()


@pytest.mark.parametrize(
    "how", [["-c", COMMAND], ["-m", "flexmarl.launch.cli.main"]], ids=["command", "module"]
)
@pytest.mark.parametrize("paths", [str(SOURCES), f"{SOURCES}{os.pathsep}"], ids=["path", "empty entry"])
def test_however_it_is_started(folder: Path, how: list[str], paths: str) -> None:
    run(folder, how, paths, "--dry-run")


def test_an_actor_of_a_program_at_a_prompt_finds_its_modules(tmp_path: Path) -> None:
    (tmp_path / "greeting.py").write_text(
        "from flexmarl.core import Actor, endpoint\n\n"
        "class Greeter(Actor):\n    @endpoint\n    async def greet(self) -> str:\n        return 'hello'\n"
    )
    program = (
        "import asyncio, pathlib, sys\nfrom flexmarl.core import ActorSystem\nfrom greeting import Greeter\n"
        "async def main():\n"
        "    async with ActorSystem('program') as system:\n"
        "        print(await (await system.spawn(Greeter, 'greeter', process=True)).api.greet())\n"
        "asyncio.run(main())\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(SOURCES)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert said.stdout == "hello\n", said.stderr


def test_the_directory_stays_if_flexmarl_is_imported_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SOURCES)
    monkeypatch.setattr(
        search_path, "__file__", str(SOURCES / "flexmarl" / "launch" / "hosts" / "search_path.py")
    )
    monkeypatch.setattr(sys, "path", ["", str(SOURCES), "/lib"])
    search_path.leave_working_directory()
    assert sys.path == ["", str(SOURCES), "/lib"]
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "path", ["", "/", "/lib"])
    search_path.leave_working_directory()
    assert sys.path == ["/lib"]
