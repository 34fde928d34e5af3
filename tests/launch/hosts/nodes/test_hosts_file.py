"""The file of hosts for ssh."""

import sys
from pathlib import Path

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.hosts.nodes.hosts_file import SshHost, read_hosts


def test_each_line_is_a_host(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text(
        "# two racks\n\ngpu1 10.0.0.11\ngpu2 ada@10.0.0.12 port=2222 python=/opt/bin/python  # old\ngpu3\n"
    )
    assert read_hosts(path) == (
        SshHost("gpu1", "10.0.0.11", None, sys.executable, f"{path}, line 3"),
        SshHost("gpu2", "ada@10.0.0.12", 2222, "/opt/bin/python", f"{path}, line 4"),
        SshHost("gpu3", "gpu3", None, sys.executable, f"{path}, line 5"),
    )


def test_all_mistakes_are_named_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("a\na 10.0.0.2\n-x\nb c d\nb port=0\nb user=ada\nb -oProxyCommand=x\nb -l\n")
    with pytest.raises(ConfigError) as refused:
        read_hosts(path)
    for problem in (
        "line 2: there is a host a already",
        "line 3: invalid name '-x'",
        "line 4: a line is NAME",
        "line 5: invalid port '0'",
        "line 6: unknown option 'user'",
        "line 7: unknown option '-oProxyCommand'",
        "line 8: invalid address '-l'",
    ):
        assert problem in str(refused.value)


def test_a_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none can't be read"):
        read_hosts(tmp_path / "none")
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="it has no host"):
        read_hosts(tmp_path / "empty")
