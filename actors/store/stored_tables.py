"""The tables of a store that runs no more, as its journal has them."""

from collections.abc import Mapping
from pathlib import Path

import msgpack

from ...core.durable.record_file import read_records
from ..columns.declared_columns import Column
from ..names import AgentName, PolicyName
from .store_journal import HEAD
from .store_setup import table_schemas
from .table_records import Kind
from .tables import Tables
from .writers import REPORT


def stored_tables(
    journal: Path, policies: Mapping[AgentName, PolicyName], columns: Mapping[AgentName, Mapping[str, Column]]
) -> Tables:
    """``policies``, ``columns``: as in ``StoreSetup``. Changes nothing. Bytes after the last whole record are left out.

    Raises FileNotFoundError, JournalError if the file is not a store's journal, StoreError if a record does not fit the
    tables.
    """
    tables = Tables(policies, table_schemas(policies, columns))
    kinds = {*map(int, Kind)}

    def read(record: bytes) -> bool:
        kind, *rest = msgpack.unpackb(record, strict_map_key=False)
        if kind == REPORT and rest[2] is not None:
            tables.apply(rest[2])
        elif kind in kinds:
            tables.apply(record)
        return True

    read_records(journal, HEAD, read)
    return tables
