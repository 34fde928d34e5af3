"""The check of a query where it is given: by the recipe's functions, or by a program that submits it."""

from ...core.errors import LocalProtocolError
from ...core.protocol.codec import Encoder
from ..messages import Query


def query_problem(query: object) -> str | None:
    """The words for "it gives ..." if the rollout workers can't get ``query`` as a query; None if they can."""
    if not isinstance(query, Query):
        return f"{type(query).__name__}, not a Query"
    texts: tuple[object, object] = (query.id, query.text)
    data: object = query.data
    if not all(isinstance(text, str) for text in texts) or not isinstance(data, dict):
        return f"{query!r}: id and text must be strings, and data a dictionary"
    try:
        Encoder().pack(query)
    except LocalProtocolError as error:
        return f"the query {query.id!r}, which can't be sent to another process: {error}"
    return None
