"""Fixtures of the tests of tables."""

import pytest

from flexmarl.actors.store.tables import Tables

from .rows import A, columns, make


@pytest.fixture
def tables() -> Tables:
    """``1:q_0_0`` READY, ``1:q_0_1`` LEASED under the second fence, ``1:q_0_2`` consumed, ``1:q_0_3`` discarded."""
    tables = make()
    tables.begin_epoch()
    tables.put({"a": columns("1:q_0_2", "1:q_0_1", "1:q_0_3", "1:q_0_0")})
    tables.discard({"a": ["1:q_0_3"]})
    fences = [tables.lease(A, 3, 1, 10.0).fence for _ in range(2)]
    tables.commit(A, fences[:1], 7)
    return tables
