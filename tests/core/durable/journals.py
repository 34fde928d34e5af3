"""A journal of replies with something in it."""

from pathlib import Path

from flexmarl.core.durable.reply_journal import ReplyJournal

HEAD = b"flexmarl replies\x03\x00\x00\x00"


def filled(path: Path, count: int = 3) -> bytes:
    with ReplyJournal.open(path) as journal:
        for seq in range(count):
            journal.put(("a", 1, seq), b"reply %d" % seq)
    return path.read_bytes()
