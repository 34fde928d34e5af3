"""ReplyCache that outlive their process: a model against random use, bounds, kills."""

import itertools
import struct
import tempfile
from pathlib import Path
from unittest import mock

import msgpack
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from structlog.testing import capture_logs

from flexmarl.core.durable import reply_journal as journal_module
from flexmarl.core.durable.reply_journal import ReplyJournal
from flexmarl.core.errors import JournalError
from flexmarl.core.protocol.reply_cache import Key, ReplyCache

from ...processes import process
from .journals import HEAD

senders = st.sampled_from(["trainer", "rollout/0", "ü\ud83d"])
epochs = st.sampled_from([1, 2, 2**63 - 1])
seqs = st.integers(0, 60)
replies = st.binary(max_size=80)


class Model:
    """The rules of ``ReplyCache``, said as simply as they can be: everything is looked through, every time."""

    def __init__(self) -> None:
        self.replies: dict[Key, bytes] = {}
        self.floors: dict[tuple[str, int], int] = {}
        self.before_epochs: dict[str, int] = {}

    def is_settled(self, key: Key) -> bool:
        sender, epoch, seq = key
        return epoch < self.before_epochs.get(sender, 0) or seq < self.floors.get((sender, epoch), 0)

    def put(self, key: Key, reply: bytes) -> None:
        if not self.is_settled(key):
            self.replies.setdefault(key, reply)

    def settle(self, sender: str, epoch: int, floor: int) -> None:
        self.floors[sender, epoch] = max(floor, self.floors.get((sender, epoch), 0))
        self._forget()

    def forget_sender(self, sender: str, before_epoch: int) -> None:
        self.before_epochs[sender] = max(before_epoch, self.before_epochs.get(sender, 0))
        self._forget()

    def _forget(self) -> None:
        self.replies = {key: reply for key, reply in self.replies.items() if not self.is_settled(key)}

    def agrees_with(self, remembered: ReplyCache | ReplyJournal) -> None:
        assert len(remembered) == len(self.replies)
        for key, reply in self.replies.items():
            assert remembered.get(key) == reply


def read_naively(content: bytes) -> Model:
    """The state that the whole records of ``content`` describe, read by the documented format."""
    model = Model()
    rest = content[len(HEAD) :]
    while len(rest) >= 12:
        length, digest = struct.unpack("<IQ", rest[:12])
        body, rest = rest[12 : 12 + length], rest[12 + length :]
        if len(body) < length or xxhash.xxh3_64_intdigest(body) != digest:
            break
        kind, *fields = msgpack.unpackb(body, unicode_errors="surrogatepass")
        match kind:
            case 1:
                model.put((fields[0], fields[1], fields[2]), fields[3])
            case 2:
                model.settle(*fields)
            case 3:
                model.forget_sender(*fields)
    return model


class Use(RuleBasedStateMachine):
    """A journal and the model, used at random; closed, killed, cut and spoiled at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.paths = (Path(self.folder.name) / f"journal-{number}" for number in itertools.count())
        self.slack = mock.patch.object(journal_module, "_SLACK_BYTES", 300)  # so that it is compacted often
        self.slack.start()
        self.path = next(self.paths)
        self.journal = ReplyJournal.open(self.path)
        self.in_memory = ReplyCache()
        self.model = Model()
        self.ever: dict[Key, set[bytes]] = {}

    def teardown(self) -> None:
        self.journal.close()
        self.slack.stop()
        self.folder.cleanup()

    @rule(sender=senders, epoch=epochs, seq=seqs, reply=replies)
    def put(self, sender: str, epoch: int, seq: int, reply: bytes) -> None:
        key = (sender, epoch, seq)
        new = key not in self.model.replies and not self.model.is_settled(key)
        assert self.journal.is_settled(key) == self.in_memory.is_settled(key) == self.model.is_settled(key)
        assert self.journal.put(key, reply) == self.in_memory.put(key, reply) == new
        self.model.put(key, reply)
        self.ever.setdefault(key, set()).add(reply)
        # A reply that has left is in the file, even if the process is killed now.
        if key in self.model.replies:
            assert read_naively(self.path.read_bytes()).replies[key] == self.model.replies[key]

    @rule(sender=senders, epoch=epochs, seq=seqs, count=st.integers(1, 20))
    def put_many(self, sender: str, epoch: int, seq: int, count: int) -> None:
        for number in range(seq, seq + count):
            self.put(sender, epoch, number, b"%d" % number)

    @rule(sender=senders, epoch=epochs, floor=st.one_of(st.integers(-1, 80), st.just(2**63)))
    def settle(self, sender: str, epoch: int, floor: int) -> None:
        assert self.journal.settle(sender, epoch, floor) == self.in_memory.settle(sender, epoch, floor)
        self.model.settle(sender, epoch, floor)

    @rule(sender=senders, before_epoch=st.sampled_from([0, 1, 2, 3]))
    def forget_sender(self, sender: str, before_epoch: int) -> None:
        self.journal.forget_sender(sender, before_epoch)
        self.in_memory.forget_sender(sender, before_epoch)
        self.model.forget_sender(sender, before_epoch)

    @rule()
    def compact(self) -> None:
        assert self.journal.compact()
        assert read_naively(self.path.read_bytes()).replies == self.model.replies

    @rule()
    def close_and_open(self) -> None:
        self.journal.close()
        self.journal = ReplyJournal.open(self.path)

    @rule()
    def kill(self) -> None:
        """Continues with the file as it is: only settled keys that were not written yet may come back."""
        path = self.copy(self.path.read_bytes())
        self.journal.close()
        self.path, self.journal = path, ReplyJournal.open(path)
        for key, reply in self.model.replies.items():
            assert self.journal.get(key) == reply
        for (sender, epoch), floor in self.model.floors.items():
            self.journal.settle(sender, epoch, floor)
        for sender, before_epoch in self.model.before_epochs.items():
            self.journal.forget_sender(sender, before_epoch)

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        content = self.path.read_bytes()
        content = content[: data.draw(st.integers(0, len(content)), label="cut at")]
        self.read_spoiled(content, read_naively(content))

    @precondition(lambda self: self.path.stat().st_size > len(HEAD))
    @rule(data=st.data(), flip=st.integers(1, 255))
    def spoil(self, data: st.DataObject, flip: int) -> None:
        content = bytearray(self.path.read_bytes())
        content[data.draw(st.integers(len(HEAD), len(content) - 1), label="spoiled at")] ^= flip
        self.read_spoiled(bytes(content), read_naively(bytes(content)))

    def read_spoiled(self, content: bytes, expected: Model) -> None:
        path = self.copy(content)
        with ReplyJournal.open(path) as spoiled:
            expected.agrees_with(spoiled)
            for key, reply in expected.replies.items():
                assert reply in self.ever[key]
            # It can be used further.
            spoiled.put(("new", 1, 0), b"new")
        with ReplyJournal.open(path) as again:
            expected.put(("new", 1, 0), b"new")
            expected.agrees_with(again)
            assert again.statistics().cut_bytes == 0

    def copy(self, content: bytes) -> Path:
        path = next(self.paths)
        path.write_bytes(content)
        return path

    @invariant()
    def agrees(self) -> None:
        self.model.agrees_with(self.journal)
        self.model.agrees_with(self.in_memory)
        statistics = self.journal.statistics()
        assert statistics.replies == len(self.model.replies)
        assert statistics.file_bytes == self.path.stat().st_size
        assert statistics.file_bytes <= 2 * statistics.live_bytes + 300 or self.journal._pending
        assert (statistics.evicted, statistics.missing, statistics.failed_writes) == (0, 0, 0)


TestUse = Use.TestCase
TestUse.settings = settings(max_examples=100, stateful_step_count=50)


# --------------------------------------------------------------------------- bounds


def test_a_reply_larger_than_the_limit_pushes_out_nothing(tmp_path: Path) -> None:
    with ReplyJournal.open(tmp_path / "journal", limit_bytes=10_000) as journal, capture_logs() as logs:
        assert journal.put(("a", 1, 0), b"small")
        assert not journal.put(("a", 1, 1), bytes(10_000))
        assert not journal.put(("a", 1, 2), bytes(10_000))
        assert journal.get(("a", 1, 0)) == b"small"
        assert journal.statistics().evicted == 2
        assert journal.statistics().file_bytes < 1000
    (line,) = logs
    assert line["log_level"] == "warning"
    assert (line["evicted"], line["limit_bytes"]) == (1, 10_000)


@given(steps=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 900), st.integers(0, 9)), max_size=60))
def test_a_journal_at_its_limit_comes_back_as_it_was(steps: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        with ReplyJournal.open(path, limit_bytes=4000) as before:
            for seq, (sender, size, back) in enumerate(steps):
                before.settle(sender, 1, seq - back)
                before.put((sender, 1, seq), bytes(size))
        with ReplyJournal.open(path, limit_bytes=4000) as after:
            assert list(after._replies.items()) == list(before._replies.items())
            assert after.statistics().size_bytes == before.statistics().size_bytes


# --------------------------------------------------------------------------- processes

_WRITER = """
import itertools, os, sys
from pathlib import Path
from flexmarl.core.durable.reply_journal import ReplyJournal
journal = ReplyJournal.open(Path(sys.argv[1]))
for seq in itertools.count(int(sys.argv[2])):
    journal.settle("sender", 1, seq - 20)
    journal.put(("sender", 1, seq), seq.to_bytes(8, "big") * 512)
    os.write(1, seq.to_bytes(8, "big"))
"""


_HOLDER = """
import sys
from pathlib import Path
from flexmarl.core.durable.reply_journal import ReplyJournal
journal = ReplyJournal.open(Path(sys.argv[1]))
if "compact" in sys.argv:
    assert journal.compact()
print("open", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_has_said_is_there(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = written = 0
    for count in (1, 300, 777, 1500):
        with process(_WRITER, str(path), str(first)) as child:
            assert child.stdout is not None
            seen = child.stdout.read(8 * count)
            child.kill()  # while it writes
            seen += child.stdout.read()
        assert child.returncode == -9
        last = int.from_bytes(seen[-8:], "big")
        assert last >= first + count - 1
        written += last - first + 1
        with ReplyJournal.open(path) as journal:
            for seq in range(max(first, last - 19), last + 1):
                assert journal.get(("sender", 1, seq)) == seq.to_bytes(8, "big") * 512
            # At most one was written and not said, and the last settlement may be lost.
            assert journal.get(("sender", 1, last + 2)) is None
            assert len(journal) <= 23
        first = last + 2
    assert written * 4096 > 3 * 2**20 > path.stat().st_size, "it was compacted on the way"


@pytest.mark.parametrize("also", ["", "compact"])
def test_two_processes_cannot_have_it(tmp_path: Path, also: str) -> None:
    path = tmp_path / "journal"
    with process(_HOLDER, str(path), also) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(JournalError, match="another process has it open"):
            ReplyJournal.open(path)
    ReplyJournal.open(path).close()


# --------------------------------------------------------------------------- full disks, closing


def test_closed(tmp_path: Path) -> None:
    journal = ReplyJournal.open(tmp_path / "journal")
    journal.put(("a", 1, 0), b"reply")
    journal.close()
    journal.close()
    assert journal.get(("a", 1, 0)) == b"reply"
    with pytest.raises(JournalError, match="it is closed"):
        journal.put(("a", 1, 1), b"")
    with pytest.raises(JournalError, match="it is closed"):
        journal.settle("a", 1, 1)
    with pytest.raises(JournalError, match="it is closed"):
        journal.forget_sender("a", 1)
    with pytest.raises(JournalError, match="it is closed"):
        journal.compact()


def test_a_key_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    with ReplyJournal.open(tmp_path / "journal") as journal:
        with pytest.raises(OverflowError):
            journal.put(("a", 2**64, 0), b"")
        assert (len(journal), journal.size_bytes) == (0, 0)


def test_settlements_alone_reach_the_file_in_time(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with ReplyJournal.open(path) as journal:
        for number in range(300):
            journal.settle(f"sender-{number}", 1, 5)
        assert read_naively(path.read_bytes()).floors == {(f"sender-{n}", 1): 5 for n in range(256)}


def test_statistics(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with ReplyJournal.open(path, limit_bytes=2**21) as journal:
        for seq in range(2000):
            journal.settle("a", 1, seq - 10)
            journal.put(("a", 1, seq), bytes(1000))
        statistics = journal.statistics()
        assert (statistics.replies, statistics.senders, statistics.limit_bytes) == (11, 1, 2**21)
        assert 11_000 < statistics.live_bytes < statistics.size_bytes == journal.size_bytes < 20_000
        assert statistics.file_bytes == path.stat().st_size <= 2**20 + 2 * statistics.live_bytes
        assert statistics.compactions == 1
        assert (statistics.evicted, statistics.cut_bytes, statistics.missing, statistics.failed_writes) == (
            0,
        ) * 4
