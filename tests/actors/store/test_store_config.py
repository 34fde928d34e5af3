"""Settings of the store's room."""

import pytest
from pydantic import ValidationError

from flexmarl.actors.store.segment_arena import ArenaLimits
from flexmarl.actors.store.store_config import StoreConfig


def test_by_default_it_is_the_arena_s() -> None:
    assert StoreConfig().limits() == ArenaLimits()


def test_a_small_store_has_room_for_the_segments_of_several_writers() -> None:
    limits = StoreConfig(memory_bytes=2**20, disk_bytes=2**22).limits()
    assert (limits.segment_bytes, limits.memory_bytes, limits.disk_bytes) == (2**16, 2**20, 2**22)
    assert StoreConfig(memory_bytes=2**36).limits().segment_bytes == ArenaLimits().segment_bytes


def test_no_room_at_all_is_refused() -> None:
    with pytest.raises(ValidationError, match="memory_bytes"):
        StoreConfig(memory_bytes=0)
