"""The last lines of a file, however long they are."""

from pathlib import Path

from flexmarl.launch.run_folder.json_lines import last_lines


def test_whole_lines_alone_are_read_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert last_lines(path, 2) == []
    path.write_bytes(b"")
    assert last_lines(path, 2) == []
    lines = [str(number).encode() * 30_000 for number in range(9)]
    path.write_bytes(b"\n".join([*lines, b"torn"]))
    assert last_lines(path, 2) == lines[-2:]
    assert last_lines(path, 99) == lines
    assert last_lines(path, 9) == lines
