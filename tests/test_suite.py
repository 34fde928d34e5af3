"""Rules that the tests themselves keep, so that they hold on a busy machine and leave nothing behind."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from .independent_tests import INDEPENDENT
from .leftovers import STATUS
from .patience import PATIENCE_S
from .processes import FEW_PLUGINS

TESTS = Path(__file__).parent
CLOCKS = {"monotonic", "perf_counter", "time"}
# Programs in virtual time, whose clock stands still while anything runs.
VIRTUAL = (
    "core/testing/",
    "core/storm.py",
    "core/cluster_storm.py",
    "core/wire/test_memory.py",
    "core/supervision/test_remote_node_storm.py",
)
VIRTUAL_OF_ACTORS = (
    "actors/rollout/",
    "actors/inference/test_instance_virtual_time.py",
    "actors/trainer/pool/test_shared_pool.py",
    "actors/trainer/pool/test_state_hosts.py",
)
# Run as a program, which can't import this package.
ALONE = "core/orphan_maker.py"


def sources() -> dict[str, str]:
    return {str(path.relative_to(TESTS)): path.read_text() for path in sorted(TESTS.rglob("*.py"))}


def violations(path: str, source: str) -> Iterator[str]:
    """Assertions on wall time, and waits that a busy machine may overrun. A module that is not in virtual time passes
    ``PATIENCE_S`` to them."""
    if path.startswith((*VIRTUAL, *VIRTUAL_OF_ACTORS, ALONE)):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            for call in ast.walk(node.test):
                if isinstance(call, ast.Call) and not call.args and _name(call.func) in CLOCKS:
                    yield f"{path}:{node.lineno}: an assertion on wall time"
        if isinstance(node, ast.Call) and _name(node.func) in ("timeout", "wait_for"):
            deadlines = [*node.args, *(keyword.value for keyword in node.keywords)]
            if any(
                isinstance(value, ast.Constant) and type(value.value) in (int, float) for value in deadlines
            ):
                yield f"{path}:{node.lineno}: a deadline of its own: take PATIENCE_S"


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else ""


def test_no_assertion_on_wall_time_and_patience_in_every_wait() -> None:
    assert [found for path, source in sources().items() for found in violations(path, source)] == []


@pytest.mark.parametrize(
    "source",
    [
        "assert time.monotonic() - began < 5",
        "assert 0.4 < asyncio.get_running_loop().time() - began",
        "async with asyncio.timeout(5): ...",
        "asyncio.wait_for(waiting, 1.0)",
        "asyncio.wait_for(waiting, timeout=20)",
    ],
)
def test_a_violation_is_found(source: str) -> None:
    assert len(list(violations("core/test_x.py", f"async def f():\n    {source}"))) == 1
    assert not list(violations("core/testing/test_x.py", f"async def f():\n    {source}"))


def test_examples_of_hypothesis_have_no_deadline() -> None:
    assert hypothesis.settings().deadline is None
    assert hypothesis.HealthCheck.too_slow in hypothesis.settings().suppress_health_check
    settings = re.compile(r"\bsettings\([^)]*\bdeadline=")
    assert not [path for path, source in sources().items() if settings.search(source)], "one profile for all"


LEAVES = {
    "nothing": "",
    "a runtime directory": "tempfile.mkdtemp(prefix='flexmarl-', dir=env.runtime_base())",
    "a temporary file": "tempfile.mkstemp()",
    "a file of its process": "subprocess.run(['mktemp'], check=True)",
}


# Each kind with and without further processes; and each of these with a test that passes and one that fails.
@pytest.mark.parametrize(
    ("what", "processes", "fails"),
    [
        (what, processes, number % 2 == processes / 2)
        for number, what in enumerate(LEAVES)
        for processes in (0, 2)
    ],
)
def test_a_session_that_leaves_something_has_a_status_of_its_own_and_it_is_removed(
    what: str, processes: int, fails: bool, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.leftovers import LeftoversPlugin\n"
        "def pytest_configure(config): config.pluginmanager.register(LeftoversPlugin(config))\n"
    )
    (tmp_path / "test_x.py").write_text(
        "import subprocess, tempfile\nfrom flexmarl.launch.hosts import env\n"
        f"def test_x():\n    {LEAVES[what] or 'pass'}\n    assert not {fails}\n"
    )
    folders = {"FLEXMARL_RUNTIME_BASE": tmp_path / "runtime", "TMPDIR": tmp_path / "temporary"}
    for folder in folders.values():
        (folder / f"flexmarl-test-session-{2**22 + 1}-killed" / "run").mkdir(parents=True)
    root = TESTS.parent
    paths = os.pathsep.join(str(path) for path in (root, root / "scripts" / "src"))
    environment = {
        **os.environ,
        **FEW_PLUGINS,
        "PYTHONPATH": paths,
        **{name: str(path) for name, path in folders.items()},
    }
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    ended = subprocess.run(
        [*command, "--numprocesses", str(processes), "--rootdir", tmp_path, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    left = what != "nothing"
    assert ended.returncode == (STATUS if left else fails), ended.stdout + ended.stderr
    assert ("the tests left these behind" in ended.stdout) == left
    assert not any(any(folder.iterdir()) for folder in folders.values())


COSTLY = """
import subprocess, sys
def test_x(): subprocess.run([sys.executable, "-c", "for _ in range(10**7): pass"], check=True)
"""


@pytest.mark.parametrize("processes", [0, 2])
def test_the_files_that_cost_most_are_shown_with_their_processes(processes: int, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.cpu_seconds import CpuSecondsPlugin\n"
        "def pytest_configure(config): config.pluginmanager.register(CpuSecondsPlugin(config))\n"
    )
    (tmp_path / "test_costly.py").write_text(COSTLY)
    (tmp_path / "test_cheap.py").write_text("def test_x(): pass\n")
    root = TESTS.parent
    paths = os.pathsep.join(str(path) for path in (root, root / "scripts" / "src"))
    options = (
        f"-q -p no:cacheprovider -c {os.devnull} --dist loadfile --numprocesses {processes} --durations 2"
    )
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        *options.split(),
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    ended = subprocess.run(
        command,
        env={**os.environ, **FEW_PLUGINS, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    _, _, shown = ended.stdout.partition("CPU seconds; by file")
    parts = re.findall(r"^ +[\d.]+  (.+)$", shown, re.MULTILINE)
    assert sorted(parts) == ["(imports and collection)", "test_costly.py"], "the two that cost most"


def test_a_test_that_runs_for_ever_shows_its_line(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import threading\ndef test_that_hangs():\n    threading.Event().wait()\n"
    )
    options = f"-c {TESTS.parent / 'pyproject.toml'} -o faulthandler_timeout=1 -p no:cacheprovider --rootdir {tmp_path}"
    command = [sys.executable, "-P", "-m", "pytest", *options.split(), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert any('test_x.py", line 3 in test_that_hangs' in line for line in process.stderr)
        finally:
            process.kill()


MEETING = """
import pathlib, time
import pytest

@pytest.mark.parametrize("number", [0, 1])
def test_x(number, testrun_uid):
    folder = pathlib.Path(__file__).parent
    (folder / f"{testrun_uid}-{number}").touch()
    deadline = time.monotonic() + WAIT_S
    while not (met := (folder / f"{testrun_uid}-{1 - number}").exists()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert met
"""


@pytest.mark.parametrize("independent", [True, False])
def test_tests_of_a_long_file_run_at_the_same_time(independent: bool, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests import independent_tests\n"
        f"independent_tests.INDEPENDENT = {{'test_long.py'}} if {independent} else set()\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(independent_tests.IndependentTestsPlugin())\n"
    )
    (tmp_path / "test_long.py").write_text(MEETING.replace("WAIT_S", str(PATIENCE_S if independent else 0.1)))
    root = TESTS.parent
    paths = os.pathsep.join(str(path) for path in (root, root / "scripts" / "src"))
    options = f"-q -p no:cacheprovider -c {os.devnull} --dist loadfile --numprocesses 2"
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *options.split(), "--rootdir", tmp_path, tmp_path],
        env={**os.environ, **FEW_PLUGINS, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert ("2 passed" if independent else "1 failed, 1 passed") in ended.stdout, ended.stdout + ended.stderr


def test_long_files_are_there() -> None:
    assert {str(path.relative_to(TESTS.parent)) for path in TESTS.rglob("test_*.py")} >= INDEPENDENT
