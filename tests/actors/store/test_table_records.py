"""Records of the journal that tables refuse."""

import pytest

from flexmarl.actors.errors import StoreError
from flexmarl.actors.names import AgentName
from flexmarl.actors.store.schema import Schema
from flexmarl.actors.store.tables import Tables

from .rows import A, columns, make


@pytest.mark.parametrize("record", [b"", b"\xc1", b"\x91\x63", b"\x92\x02\x91\x92\xa1z\x80"])
def test_a_record_that_does_not_fit_is_refused(record: bytes) -> None:
    with pytest.raises(StoreError):
        make().apply(record)


def test_a_record_of_a_column_that_the_run_lacks_now_is_refused(tables: Tables) -> None:
    record = tables.put({"a": columns("2:q_0_0", note=["x"])}).record
    assert record is not None
    with pytest.raises(StoreError, match="unknown column"):
        Tables({AgentName("a"): A}, {AgentName("a"): Schema({})}).apply(record)
