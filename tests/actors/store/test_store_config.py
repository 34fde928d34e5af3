"""Settings of the store's room."""

import pytest
from pydantic import ValidationError

from flexmarl.actors.store.segment_arena import ArenaLimits
from flexmarl.actors.store.store_config import StoreConfig


def test_by_default_it_is_the_arena_s() -> None:
    assert StoreConfig().limits() == ArenaLimits()


def test_a_small_store_has_segments_that_fit() -> None:
    limits = StoreConfig(memory_bytes=2**20, disk_bytes=2**22).limits()
    assert (limits.segment_bytes, limits.memory_bytes, limits.disk_bytes) == (2**22, 2**20, 2**22)


def test_segments_have_the_size_of_the_config() -> None:
    assert StoreConfig(segment_bytes=2**16).limits().segment_bytes == 2**16
    assert StoreConfig(segment_bytes=2**16, memory_bytes=2**15, disk_bytes=0).limits().segment_bytes == 2**15


def test_no_room_at_all_is_refused() -> None:
    with pytest.raises(ValidationError, match="memory_bytes"):
        StoreConfig(memory_bytes=0)
