"""A query as one string of a source's state."""

from base64 import b64decode, b64encode

from pydantic import TypeAdapter

from ....core.protocol import codec
from ...messages import Query

_QUERY: TypeAdapter[Query] = TypeAdapter(Query)


def pack_query(query: Query) -> str:
    """As on the way to a rollout worker: its data may hold bytes, which JSON has not."""
    return b64encode(codec.Encoder(inline_bytes=codec.MAX_BODY_BYTES).pack(query)).decode()


def unpack_query(text: str) -> Query:
    """The query of ``pack_query``."""
    return _QUERY.validate_python(codec.unpack(b64decode(text)))
