"""The lines of a file of a run as it grows, for readers of a folder that a run works on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .json_lines import lines_from

_HEAD_BYTES: Final = 256


class GrowingFile:
    """The next lines of a file that others append to, and may replace: a run that begins again writes its files from
    the start, and a file system may give the new one the inode of the old one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at, self._inode, self._head = 0, 0, b""

    def is_replaced(self) -> bool:
        """True if the file is another one than before: all has to be read again."""
        try:
            with self._path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
            status = self._path.stat()
        except OSError:
            return self._at > 0
        is_other = status.st_ino != self._inode or status.st_size < self._at
        is_other |= not head.startswith(self._head[: self._at])
        replaced = self._at > 0 and is_other
        self._inode, self._head = status.st_ino, head
        return replaced

    def lines(self) -> Iterator[bytes]:
        """The whole lines that were not returned before."""
        while lines := lines_from(self._path, self._at):
            self._at += sum(map(len, lines))
            yield from lines

    def rewind(self) -> None:
        """Begins again at the first line."""
        self._at = 0
