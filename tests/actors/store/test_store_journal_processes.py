"""The store's journal: processes that are killed, and two of one file."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.store.store_journal import StoreJournal
from flexmarl.core.errors import JournalError

from ...processes import process
from .journal_format import ignore

_WRITER = """
import asyncio, itertools, os, sys
from pathlib import Path
from flexmarl.actors.store import store_journal as module
module._CHUNK_BYTES = 2**12
latest = {}
def read(body):
    latest[body[:1]] = int.from_bytes(body[1:9], "big")
async def client(journal, name):
    for number in itertools.count(latest.get(name, -1) + 1):
        latest[name] = number
        await journal.append(name + number.to_bytes(8, "big") * 50)
        os.write(1, name + number.to_bytes(8, "big"))
async def main():
    journal = module.StoreJournal.open(Path(sys.argv[1]), read)
    async with asyncio.TaskGroup() as tasks:
        for name in (b"a", b"b", b"c"):
            tasks.create_task(client(journal, name))
        while True:
            snapshot = [name + number.to_bytes(8, "big") * 50 for name, number in latest.items()] * 20
            await journal.compact(snapshot)
            await asyncio.sleep(0)
asyncio.run(main())
"""


def test_what_a_killed_process_has_acknowledged_is_there(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for count in (1, 500, 1500):
        with process(_WRITER, str(path)) as child:
            assert child.stdout is not None
            said = child.stdout.read(9 * count)
            child.kill()  # while it writes and compacts
            said += child.stdout.read()
        assert child.returncode == -9
        latest: dict[bytes, int] = {}

        def read(body: bytes, latest: dict[bytes, int] = latest) -> None:
            name, number = body[:1], int.from_bytes(body[1:9], "big")
            assert body[1:] == body[1:9] * 50
            assert number in (latest.get(name, number), latest.get(name, number) + 1), "none is left out"
            latest[name] = number

        asyncio.run(StoreJournal.open(path, read).close())
        for start in range(0, len(said), 9):
            name, number = said[start : start + 1], int.from_bytes(said[start + 1 : start + 9], "big")
            assert latest[name] >= number


_HOLDER = """
import asyncio, sys
from pathlib import Path
from flexmarl.actors.store.store_journal import StoreJournal
async def main():
    journal = StoreJournal.open(Path(sys.argv[1]), print)
    if sys.argv[2] == "compact":
        await journal.compact([])
    print("open", flush=True)
    sys.stdin.read()
asyncio.run(main())
"""


@pytest.mark.parametrize("also", ["", "compact"])
def test_two_processes_cannot_have_it(tmp_path: Path, also: str) -> None:
    path = tmp_path / "journal"
    with process(_HOLDER, str(path), also) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(JournalError, match="another process has it open"):
            StoreJournal.open(path, ignore)
    nothing: Any = asyncio.run(StoreJournal.open(path, ignore).close())
    assert nothing is None
