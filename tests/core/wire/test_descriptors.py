"""The limit of open files: raised at the start, and never met by libzmq, which would abort the process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
BEGIN = """
import asyncio, errno, resource, sys
from pathlib import Path
from flexmarl.core import Actor, ActorSystem, LocalProtocolError, endpoint

class Subject(Actor):
    @endpoint
    async def ask(self) -> int:
        return 1

folder = Path(sys.argv[1])
"""
RAISED = """
async def main():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    async with ActorSystem("service", folder):
        print(hard, *resource.getrlimit(resource.RLIMIT_NOFILE))
asyncio.run(main())
"""
EXHAUSTED = """
async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    systems, refused = [], None
    while refused is None:
        system = ActorSystem(f"system-{len(systems)}", folder)
        try:
            await system.__aenter__()
        except OSError as error:
            refused = error
        else:
            systems.append(system)
            await system.add(Subject(), "subject")
    assert refused.errno == errno.EMFILE, refused
    print(refused)
    for other in systems[1:]:
        try:
            assert await systems[0].ref("subject", other.address, Subject).api.ask() == 1
        except LocalProtocolError as error:
            print(error)
            break
    assert await systems[0].ref("subject", systems[0].address, Subject).api.ask() == 1
    for system in reversed(systems):
        await system.__aexit__(None, None, None)
asyncio.run(main())
"""


def output_of(script: str, folder: Path) -> tuple[list[str], str]:
    """The lines that a process prints, and its standard error. It ends in good order."""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", BEGIN + script, str(folder)],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts" / "src")},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines(), ended.stderr


def test_the_limit_is_raised_to_the_hard_one(tmp_path: Path) -> None:
    ((line,), _) = output_of(RAISED, tmp_path)
    hard, *limits = line.split()
    assert limits == [hard, hard] and int(hard) > 256


def test_systems_and_connections_beyond_the_limit_are_refused_and_the_process_lives(tmp_path: Path) -> None:
    (system, connection), log = output_of(EXHAUSTED, tmp_path)
    assert "of 128 file descriptors are in use" in system and "to listen on ipc://" in system
    assert "of 128 file descriptors are in use" in connection and "to connect to" in connection
    assert "ulimit -n 256" in system and "ulimit -n 256" in connection
    assert "too few file descriptors are left" in log and "used=" in log and "limit=128" in log
