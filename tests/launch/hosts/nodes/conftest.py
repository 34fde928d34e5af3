"""The runs of ``tests/launch``, on hosts that are network namespaces."""

import os
from collections.abc import Iterator

import pytest

from flexmarl.launch.bench.namespaces import Host, two_hosts

from ...conftest import launcher
from .sshd import Sshd, running_sshd

__all__ = ["launcher"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """The head's and another one; where namespaces are not allowed, both are this one."""
    with two_hosts() as (near, far):
        yield near, far


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as made:
        yield made


@pytest.fixture
def path_of_ssh(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{sshd.ssh}:{os.environ['PATH']}")
