"""The disk of a simulated head: full for a while, and after a loss of power a file has what was forced to it, and a
drawn part more.

    disk = SimulatedDisk(folder, random.Random(7))
    with disk.watched():        # fsync(2) and write(2) of this process are noted
        disk.is_full = True     # appending to a file of the folder raises ENOSPC
        ...
        disk.lose_power()       # decides what survives, at this moment
        ...                     # the processes end; their last writes go nowhere
        disk.restore()          # the folder is as the host finds it when it starts again

As POSIX has it: a content is safe once its file was synced, a name once its folder was. Everything else survives or
does not, file by file: a new file may be empty, cut short or missing, an appended part too, and in place of a new file
the one that it has replaced may be there. Only ``os.write`` finds a full disk: journals and logs are written by it, and
files that are written as a whole find room.
"""

import errno
import os
import random
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Tree = dict[str, "bytes | Tree"]
"""Files and folders by name."""


class SimulatedDisk:
    """``folder``: the one that is watched, with all below it; the folder itself is safe."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.is_full = False
        self._folder = folder
        self._draw = draw
        self._contents: dict[int, bytes] = {}
        """Contents of files as they were synced last, by inode."""
        self._names: dict[int, dict[str, int]] = {}
        """Names in folders, with their inodes, as they were synced last, by the folder's inode."""
        self._held: list[int] = []
        self._survivors: Tree | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes each ``os.fsync`` of this process, and refuses ``os.write`` while the disk is full."""
        fsync, write = os.fsync, os.write

        def note_and_sync(fd: Any) -> None:
            self._note(fd)
            fsync(fd)

        def write_if_room(fd: int, data: Any) -> int:
            if self.is_full and self._has(fd):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(fd, data)

        os.fsync, os.write = note_and_sync, write_if_room
        try:
            yield
        finally:
            os.fsync, os.write = fsync, write
            for descriptor in self._held:
                os.close(descriptor)
            self._held.clear()

    def lose_power(self) -> None:
        """Decides what survives of the folder as it is now."""
        self._survivors = self._surviving(self._folder)

    def restore(self) -> None:
        """Gives the folder what has survived the last ``lose_power``; nothing without one."""
        survivors, self._survivors = self._survivors, None
        if survivors is not None:
            for path in self._folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            self._write(self._folder, survivors)
            self._note_all(self._folder)

    def _has(self, file: int) -> bool:
        """True for a file of the folder."""
        return Path(f"/proc/self/fd/{file}").readlink().is_relative_to(self._folder.absolute())

    def _note(self, file: int) -> None:
        status = os.fstat(file)
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(file) as entries:
                self._names[status.st_ino] = {entry.name: entry.inode() for entry in entries}
        elif stat.S_ISREG(status.st_mode):
            if status.st_ino not in self._contents:
                self._held.append(os.dup(file))  # no other file gets its inode
            self._contents[status.st_ino] = Path(f"/proc/self/fd/{file}").read_bytes()

    def _surviving(self, folder: Path) -> Tree:
        names = self._names.get(folder.stat().st_ino, {})
        tree: Tree = {}
        for path in sorted(folder.iterdir()):
            inode = path.lstat().st_ino
            if names.get(path.name) != inode and self._is_lost():
                if (earlier := self._contents.get(names.get(path.name, -1))) is not None:
                    tree[path.name] = earlier
            elif path.is_dir():
                tree[path.name] = self._surviving(path)
            else:
                tree[path.name] = self._content(path, inode)
        for name in sorted(names.keys() - {path.name for path in folder.iterdir()}):
            if names[name] in self._contents and not self._is_lost():  # its removal is lost
                tree[name] = self._contents[names[name]]
        return tree

    def _content(self, path: Path, inode: int) -> bytes:
        written, synced = path.read_bytes(), self._contents.get(inode, b"")
        if not written.startswith(synced):
            return synced
        rest = written[len(synced) :]
        return synced + (rest[: self._draw.randint(0, len(rest))] if self._is_lost() else rest)

    def _is_lost(self) -> bool:
        return self._draw.random() < 0.5

    def _write(self, folder: Path, tree: Tree) -> None:
        for name, content in tree.items():
            path = folder / name
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                path.mkdir(mode=0o700)
                self._write(path, content)

    def _note_all(self, folder: Path) -> None:
        """Notes all that a host finds when it starts: that is on the disk."""
        for path in [*folder.rglob("*"), folder]:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                self._note(descriptor)
            finally:
                os.close(descriptor)
