"""A journal of replies on a full disk."""

from pathlib import Path
from unittest import mock

from structlog.testing import capture_logs

from flexmarl.core.durable import reply_journal as journal_module
from flexmarl.core.durable.reply_journal import ReplyJournal

from ...full_disk import room_for
from .journals import filled


def after_a_kill_now(path: Path) -> list[int]:
    """The seqs of sender ``a`` that a process started now would know."""
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    with ReplyJournal.open(copy) as journal:
        return [key[2] for key, _ in journal._replies.items()]


def test_on_a_full_disk_replies_stay_in_memory_and_are_written_later(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    filled(path, count=2)
    with ReplyJournal.open(path) as journal, capture_logs() as logs:
        size = path.stat().st_size
        with room_for(size + 40):
            for seq in range(2, 6):
                assert journal.put(("a", 1, seq), bytes(100))
                assert journal.get(("a", 1, seq)) == bytes(100)
        assert path.stat().st_size == size + 40, "the write stopped in the middle"
        assert after_a_kill_now(path) == [0, 1]
        statistics = journal.statistics()
        assert (statistics.missing, statistics.failed_writes, statistics.file_bytes) == (4, 4, size)
        failures = [line for line in logs if line["log_level"] == "error"]
        assert len(failures) == 1 and failures[0]["path"] == str(path) and "too large" in failures[0]["error"]

        journal.put(("a", 1, 6), b"there is room again")
        assert journal.statistics().missing == 0
        assert after_a_kill_now(path) == [0, 1, 2, 3, 4, 5, 6]
        assert [line["event"] for line in logs].count("journal whole again") == 1


def test_a_log_on_the_full_disk_is_no_error_either(tmp_path: Path) -> None:
    path, log = tmp_path / "journal", mock.Mock()
    log.error.side_effect = [OSError(28, "No space left on device"), None]
    filled(path)
    with mock.patch.object(journal_module, "log", log), ReplyJournal.open(path) as journal:
        with room_for(path.stat().st_size):
            for seq in range(3, 6):
                assert journal.put(("a", 1, seq), b"reply")
        assert log.error.call_count == 2, "said again until it is said, and then no more"
        assert log.error.call_args.kwargs["path"] == str(path)
        log.warning.side_effect = OSError(28, "No space left on device")
        assert journal.put(("a", 1, 6), b"reply")
        assert journal.statistics().missing == 0


def test_half_a_record_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    filled(path, count=2)
    with ReplyJournal.open(path) as journal:
        with room_for(path.stat().st_size + 40):
            journal.put(("a", 1, 2), bytes(100))
        (tmp_path / "journal.new").mkdir()  # so that no replacement can be written
        with capture_logs() as logs:
            for seq in range(3, 10):
                journal.put(("a", 1, seq), b"fits")
        assert [line["event"] for line in logs] == ["journal not compacted"], "tried once, not at every reply"
        assert after_a_kill_now(path) == [0, 1, *range(3, 10)]
        (tmp_path / "journal.new").rmdir()
    assert after_a_kill_now(path) == list(range(10)), "closing writes what was missing"


def test_closing_on_a_full_disk_leaves_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    content = filled(path)
    journal = ReplyJournal.open(path)
    with room_for(len(content) + 40):
        journal.put(("a", 1, 3), bytes(100))
        journal.close()
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["journal"]
