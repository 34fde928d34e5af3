"""Builds of the checkout: the wheel holds the package and nothing else, and works after its installation."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import flexmarl
from flexmarl.launch.config.config_reading import resolve
from scripts.bench.commands import BENCHMARKS

from .machine import install_wheel
from .patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
LAYERS = ("core", "transport", "actors", "launch")
DIST_INFO = f"flexmarl-{flexmarl.__version__}.dist-info"


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """A command's standard output. Raises AssertionError with its whole output if it fails."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, into: Path, *what: str) -> Path:
    """Builds without downloads: hatchling is one of the dev tools."""
    run(sys.executable, "-P", "-m", "build", "--no-isolation", *what, "--outdir", into, source)
    [built] = into.iterdir()
    return built


@dataclass(frozen=True)
class Wheel:
    path: Path
    names: list[str]
    metadata: Message

    @classmethod
    def read(cls, path: Path) -> "Wheel":
        with zipfile.ZipFile(path) as archive:
            metadata = Parser().parsestr(archive.read(f"{DIST_INFO}/METADATA").decode())
            return cls(path, archive.namelist(), metadata)

    def content(self, name: str) -> bytes:
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(name)

    def text(self, name: str) -> str:
        return self.content(name).decode()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    return Wheel.read(build(ROOT, tmp_path_factory.mktemp("wheel"), "--wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution."""
    path = build(ROOT, tmp_path_factory.mktemp("sdist"), "--sdist")
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(path) as archive:
        names = archive.getnames()
    assert len(names) == len(set(names))
    run("tar", "--extract", "--file", path, "--directory", unpacked)
    return unpacked / f"flexmarl-{flexmarl.__version__}"


@pytest.fixture(scope="module")
def installed(wheel: Wheel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed in it. Its dependencies are those of the tests' environment."""
    target = tmp_path_factory.mktemp("installed")
    install_wheel(wheel.path, target)
    return target


def files_of_the_checkout() -> set[str]:
    """The package's files in the checkout, as their names in a wheel."""
    found = {
        f"flexmarl/{path.relative_to(ROOT)}"
        for layer in LAYERS
        for path in (ROOT / layer).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    return found | {"flexmarl/__init__.py", "flexmarl/py.typed", "flexmarl/testing.py"}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Wheel) -> None:
    assert [name for name, count in Counter(wheel.names).items() if count > 1] == []
    package = {name for name in wheel.names if not name.startswith(f"{DIST_INFO}/")}
    assert package == files_of_the_checkout()
    assert {
        "flexmarl/launch/monitoring/page/web/uplot/LICENSE",
        "flexmarl/launch/docs/settings.md",
    } <= package


def test_benchmarks_of_the_checkout_are_not_in_the_wheel(wheel: Wheel) -> None:
    names = {Path(name).name for name in wheel.names if name.startswith("flexmarl/launch/bench/")}
    assert {"calls.py", "network.py", "tensors.py"} <= names
    assert not names & {f"{benchmark}.py" for benchmark in BENCHMARKS}
    assert not [name for name in wheel.names if "scripts/" in name]


def test_the_wheel_holds_every_recipe_whole(wheel: Wheel) -> None:
    recipes = [
        path.name for path in (ROOT / "launch" / "recipes").iterdir() if (path / "config.yaml").exists()
    ]
    assert {"sort_digits", "shared_sort"} <= set(recipes)
    for recipe in recipes:
        folder = f"flexmarl/launch/recipes/{recipe}"
        assert {f"{folder}/config.yaml", f"{folder}/workflow.py"} <= set(wheel.names)
        config = resolve(recipe, [])
        for policy in config.policies.values():
            tokenizer = Path(policy.real_model.tokenizer_source)
            if recipe != "math_debate":  # its models are on a hub
                assert f"flexmarl/{tokenizer.relative_to(ROOT)}/tokenizer.json" in wheel.names


def test_the_wheel_says_what_it_is(wheel: Wheel) -> None:
    assert wheel.metadata["Name"] == "flexmarl"
    assert wheel.metadata["Version"] == flexmarl.__version__
    assert wheel.metadata["License-Expression"] == "Apache-2.0"
    assert wheel.metadata.get_all("License-File") == ["LICENSE"]
    sinks = {"tensorboard", "wandb", "mlflow", "prometheus", "opentelemetry"}
    programs = {"gateway", "clients"}
    environments = {"verifiers", "gymnasium", "pettingzoo", "openenv", "mcp", "sandbox"}
    others = {"vllm", "lora", "openai", "datasets", "page", "top", "plan", "service", "bench", "dev"}
    extras = others | sinks | environments | programs
    assert set(wheel.metadata.get_all("Provides-Extra", [])) == extras
    assert wheel.text(f"{DIST_INFO}/licenses/LICENSE") == (ROOT / "LICENSE").read_text()
    assert (
        wheel.text(f"{DIST_INFO}/entry_points.txt")
        == "[console_scripts]\nflexmarl = flexmarl.launch.cli.main:main\n"
    )


def test_scripts_install_extras_that_the_package_has(wheel: Wheel) -> None:
    """pip only warns of others."""
    scripts = [path for path in (ROOT / "scripts").rglob("*") if path.is_file() and "." not in path.name]
    lines = re.findall(r"(?m)^ *install ([a-z,]+)$", "\n".join(path.read_text() for path in scripts))
    assert len(lines) >= 5
    extras = set(wheel.metadata.get_all("Provides-Extra", []))
    assert {extra for line in lines for extra in line.split(",")} <= extras


def test_the_pinned_versions_are_ones_that_the_package_admits(wheel: Wheel) -> None:
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    needed = [Requirement(text) for text in wheel.metadata.get_all("Requires-Dist", [])]
    installed = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": "dev"})]
    assert {"torch", "pytest"} <= {one.name for one in installed}
    for requirement in installed:
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_the_source_distribution_builds_the_same_wheel(wheel: Wheel, sdist: Path, tmp_path: Path) -> None:
    assert {path.name for path in sdist.iterdir()} == {
        "scripts",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "PKG-INFO",
        ".gitignore",
    }
    assert not [path for path in sdist.rglob("*") if path.is_symlink()]
    again = Wheel.read(build(sdist, tmp_path, "--wheel"))
    assert sorted(again.names) == sorted(wheel.names)
    ours = [name for name in wheel.names if name.startswith("flexmarl/")]
    assert all(again.content(name) == wheel.content(name) for name in ours)


def test_the_installed_package_works_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    program = "import flexmarl.transport, flexmarl.launch.cli.main; print(flexmarl.launch.cli.main.__file__)"
    said = run(sys.executable, "-P", "-c", program, cwd=tmp_path, PYTHONPATH=str(installed))
    assert Path(said.strip()) == installed / "flexmarl" / "launch" / "cli" / "main.py"

    command: list[str | Path] = [sys.executable, installed / "bin" / "flexmarl"]
    said = run(*command, "--version", cwd=tmp_path, PYTHONPATH=str(installed))
    assert said == f"flexmarl, version {flexmarl.__version__}\n"
    assert "train" in run(*command, "--help", cwd=tmp_path, PYTHONPATH=str(installed))
    said = run(*command, "train", "--dry-run", cwd=tmp_path, PYTHONPATH=str(installed))
    assert str(installed / "flexmarl" / "launch" / "recipes") in said
