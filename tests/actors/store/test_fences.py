"""Fences of leases: before the first epoch, of an earlier epoch, after the deadline."""

import pytest

from flexmarl.actors.errors import StoreError
from flexmarl.actors.store.tables import Tables

from .rows import FIRST, A, columns, make


def test_a_fence_of_an_earlier_epoch_is_refused(tables: Tables) -> None:
    tables.begin_epoch()
    with pytest.raises(StoreError, match="it is of epoch 1, the store is in epoch 2: its rows went back"):
        tables.commit(A, [FIRST + 1], 8)
    again = tables.lease(A, 3, 2, 10.0)
    assert again.columns["sample_id"] == ["1:q_0_1", "1:q_0_0"]
    assert again.fence == 2 << 32 | 1


def test_nothing_is_leased_before_the_first_epoch() -> None:
    tables = make()
    tables.put({"a": columns("1:q_0_0")})
    with pytest.raises(StoreError, match="before the store's epoch has begun"):
        tables.lease(A, 3, 1, 10.0)
    assert tables.queue(A).ready(3) == 1


def test_leases_expire_at_their_deadline(tables: Tables) -> None:
    tables.lease(A, 3, 1, 5.0)
    assert tables.expire(4.9) == {}
    assert tables.expire(10.0) == {A: [FIRST + 1, FIRST + 2]}
    assert tables.queue(A).ready(3) == 2
