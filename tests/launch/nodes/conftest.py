"""The runs of ``tests/launch``, on hosts that are network namespaces."""

from collections.abc import Iterator

import pytest

from flexmarl.launch.bench.namespaces import Host, two_hosts

from ..conftest import launcher

__all__ = ["launcher"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """The head's and another one; where namespaces are not allowed, both are this one."""
    with two_hosts() as (near, far):
        yield near, far
